"""Translation of Trinity-RFT configurations."""
