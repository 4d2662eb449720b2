"""What `trimtab doctor` looks at, and what it says about it."""
