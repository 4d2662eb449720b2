"""The findings of `trimtab doctor`."""
