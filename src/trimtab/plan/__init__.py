"""The run without values: what every rank will hold, before anybody pays for it."""
