"""Decode tables without polars: what decodegate decode measures, no report."""

import shutil
import sys
from pathlib import Path

from replay.cli import decode
from replay.experiment import load_experiment
from workloads.errors import UserError

if __name__ == "__main__":
    experiment, run = load_experiment(Path(sys.argv[1])), Path(sys.argv[2])
    try:
        decode(experiment, run=run)
    except UserError as error:
        print("FIRST TRY:", error)
        shutil.rmtree(run, ignore_errors=True)
        decode(experiment, run=run, allow_unmatched=True)
