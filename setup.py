"""Packaging of roll_opd."""

from setuptools import find_packages, setup

setup(
    name="roll_opd",
    version="0.1.0",
    packages=find_packages(include=["roll_opd*"]),
    python_requires=">=3.10",
    entry_points={
        "console_scripts": ["roll-opd = roll_opd.cli:main"],
        "vllm.general_plugins": ["roll_opd = roll_opd.inference.plugin:register"],
    },
)
