"""Workflow classes and reward functions of Trinity-RFT. `roll_opd.workflows` exports them under the same names."""
