"""Translation of configurations written for ROLL and Trinity-RFT."""
