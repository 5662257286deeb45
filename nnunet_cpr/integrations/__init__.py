"""CPR in other libraries, under their own conventions."""
