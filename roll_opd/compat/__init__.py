"""Configurations of ROLL and Trinity-RFT in the terms of this package; imported only for files that need it."""
