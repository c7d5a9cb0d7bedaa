"""Layer profiles likewise: EXPERIMENT RUN TRACES STEPS."""

import sys
from pathlib import Path

from replay.cli import profile_layers
from replay.experiment import load_experiment
from replay.profile import Wanted

if __name__ == "__main__":
    wanted = Wanted(batch=1, steps=int(sys.argv[4]), traces=Path(sys.argv[3]))
    profile_layers(load_experiment(Path(sys.argv[1])), wanted, run=Path(sys.argv[2]), allow_unmatched=True)
