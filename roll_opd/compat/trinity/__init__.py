"""Configurations of Trinity-RFT, put under our keys."""
