"""A diffusers pipeline as the engine sees it: family facts as data, loading, one clone per request."""
