"""Results that others have published, in folders that a study reads."""
