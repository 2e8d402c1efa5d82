"""Images of hpcdist: build them, look into them, check them, make of them what other runtimes read."""
