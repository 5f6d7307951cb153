"""Code that multiplies activations with a codec's fields, one file per device family."""
