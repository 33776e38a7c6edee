"""Self-contained HTML pages with interactive plots."""
