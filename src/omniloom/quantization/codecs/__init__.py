"""Storage formats of weight matrices, one file per family."""
