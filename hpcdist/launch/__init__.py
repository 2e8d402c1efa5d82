"""Starting ranks somewhere, watching them, and deciding what follows from how they end. Never imports torch."""
