"""``prepare-data`` recipes for data sets that few users need."""
