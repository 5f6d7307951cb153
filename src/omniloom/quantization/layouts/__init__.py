"""How producers store a codec's fields in files: tensor names, packing, config keys."""
