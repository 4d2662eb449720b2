"""Where trimtab plugs into other frameworks. Each folder imports its framework, and nothing else does."""
