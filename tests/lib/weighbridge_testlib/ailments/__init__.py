"""For every rule of `registry diagnose` folders where it must speak and folders where it must stay silent.

AILMENTS["rank-differs"].sick(tmp_path, Dice(3))   returns what is asked about, and the base where one is given
"""

from typing import Final

from weighbridge_testlib.ailments import files, machines, names, papers
from weighbridge_testlib.ailments.making import Ailment, Asked, Dice

AILMENTS: Final[dict[str, Ailment]] = {**files.AILMENTS, **papers.AILMENTS, **names.AILMENTS, **machines.AILMENTS}

__all__ = ["AILMENTS", "Ailment", "Asked", "Dice"]
