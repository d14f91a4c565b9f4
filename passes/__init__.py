"""The verbs: one pass a file, Program in, Program out. Installed as `tpcompile.passes`."""

if not __name__.startswith("tpcompile."):
    raise ImportError("import tpcompile.passes, not passes; in a checkout: pip install -e .")
