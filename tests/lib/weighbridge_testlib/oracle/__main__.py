"""Run one group of cases."""

import importlib
import sys
import warnings
from pathlib import Path

from weighbridge_testlib.oracle import told

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    told.build(importlib.import_module(f"weighbridge_testlib.oracle.{sys.argv[1]}").cases(), Path(sys.argv[2]))
