"""What acts on live modules: hooks, compilation and, later, placement, caches, attention, adapters."""
