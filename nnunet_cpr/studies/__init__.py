"""Cross-validation studies: which trainer is better on a data set, as a table."""
