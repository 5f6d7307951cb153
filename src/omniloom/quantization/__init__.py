"""Quantization: config, rules, codecs, layouts, kernels and the quantized Linear."""
