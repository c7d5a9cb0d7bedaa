"""Invented questions in each benchmark's schema: same columns, nothing of the benchmarks."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from evals.tasks.lengths import ENCODING, Table

Row = dict[str, Any]

_SENTENCES = """\
When {a} came back from {p}, the kettle was still warm and nobody had touched the letter on the table.
It rained on and off until Thursday, which suited {a} very well, because the roof of the workshop had been mended.
"You can't row against that current," said {a}, and pulled the boat up onto the shingle anyway.
There were eleven jars of quince jam in the pantry; by Michaelmas only the labels would be left.
Some said the bell of {p} had cracked in the great frost, others that it had never been whole.
{a} kept a notebook for debts, a second one for grudges, and lost both in the same week.
Beyond the quarry the road narrows, turns twice, and gives up altogether at a gate without a fence.
Every evening at a quarter past six the ferry blew its horn, and the dogs of {p} answered.
The jury of the flower show had never seen a dahlia of that colour, and privately hoped not to see one again.
{a} and {b} had not spoken since the business with the goat, though they waved, stiffly, across the square.
A zinc bucket, half a ladder and an umbrella: this was what the flood had brought, and what it left.
It is not true that {b} could not swim; he simply saw no reason to begin.
They measured the orchard with a knotted rope, quarrelled over the knots, and measured it once more.
By then the exhibition had closed, the posters were peeling, and only the caretaker still quoted prices.
"Forty-two," {b} whispered, counting the geese; then one moved, and it was a paper bag.
In the back of the drawer lay a key that fitted no lock in the house, polished by four generations of thumbs.
The baker of {p} swore by cold water, a hot oven, and not asking what was in the rye.
Nobody had told the clockmaker about summer time, and so for six months he was the only honest man in town.
{a} took the night train because it was cheap, and arrived, as always, a day older than expected.
Moss grew on the north side of everything, including, it was rumoured, the mayor.
On Sundays {b} played the accordion with the windows shut, out of kindness.
The map showed a lake where the village stood; whoever had drawn it was either careless or very patient.
"If the weather holds," {a} used to say, and it held just long enough for the sentence.
Exactly one tram a day went out to {p}, empty, and came back with a single pumpkin on the front seat.
You could buy almost anything at the market: hinges, quails, spectacles for somebody else's eyes.
{b} had inherited a violin, a vineyard and an enemy, and looked after all three.
In January the harbour froze from jetty to jetty, and children skated out to read the names of the ships.
The veterinary surgeon shook her head, wrapped up the owl in her own scarf, and sent no bill.
What {a} remembered best was the smell: wet wool, oranges, and chalk.
After the concert the hall was swept, and in the dust they found a pearl, a tooth, and two tickets to {p}.
Jackdaws had nested in the organ; the hymns that spring were brief and full of surprises.
"It only looks expensive," {b} explained, and the next moment it no longer did.
Halfway up the hill stands a bench with a view of another bench.
The postmistress read no letters, but she weighed them in her hand and was seldom wrong.
For the whole of October fog lay over {p}, and people recognised one another by their coughs.
{a} painted the fence green, then blue, then, having run out of arguments, left it alone.
Deep in the vault somebody had chalked a sum on the wall, and got it nearly right.
Next to the chapel grew a walnut tree so old that three parishes claimed its shade.
When the lights failed, {b} went on with the lecture, and several listeners thought it improved.
Half of the village voted for the bridge, half against, and the river carried on as before.
"""
_NAMES = "Agnes|Bruno|Clemency|Dmitri|Esther|Fergus|Greta|Hakim|Ingrid|Joaquin|Kezia|Ludo|Marguerite|Niels|Odile|Piotr"
_PLACES = "Vexford|Little Quay|Zellbach|Port Hark|Joskin|Overmill|Kypsala|Thornby Wick|Fjordgate|Quince Hill"
_FORMS = ["poem", "short story", "letter", "riddle", "news report"]
_TOPICS = ["lighthouses", "beekeeping", "lost gloves", "harbour cranes", "apple orchards", "winter trains"]


def prose(random_: random.Random, characters: int) -> str:
    """Plausible English of at least so many characters: sentences in another order each time, and other names."""
    a, b = random_.sample(_NAMES.split("|"), 2)
    text = ""
    while len(text) < characters:
        sentences = _SENTENCES.splitlines()
        random_.shuffle(sentences)
        for sentence in sentences:
            if len(text) < characters:
                text += sentence.format(a=a, b=b, p=random_.choice(_PLACES.split("|"))) + " "
    return text.strip()


def aime25(count: int = 30) -> list[Row]:
    """Sums whose answers are integers from 0 to 999, as strings."""
    return [
        {
            "id": str(number),
            "problem": f"A crate holds ${number + 2}$ trays of ${7 * number + 3}$ pears. Find the number of pears.",
            "answer": str((number + 2) * (7 * number + 3) % 1000),
        }
        for number in range(count)
    ]


def gpqa_diamond(count: int = 198) -> list[Row]:
    """Questions about metals that do not exist."""
    return [
        {
            "Record ID": f"rec{number:05d}",
            "Question": f"Invented metal {number} melts at {number + 300} K. At which temperature is it solid?",
            "Correct Answer": f"{number + 250} K\n",
            "Incorrect Answer 1": f"{number + 350} K",
            "Incorrect Answer 2": f"{number + 450} K",
            "Incorrect Answer 3": f"{number + 550} K",
            "Subdomain": "Metals (invented)",
        }
        for number in range(count)
    ]


def mrcr(count: int = 24, *, needles: Sequence[int] = (2, 4, 8), characters: int = 600) -> list[Row]:
    """Chats with alike pieces of writing among others; every piece of about so many characters."""
    rows = []
    for number in range(count):
        random_ = random.Random(number)
        alike = needles[number % len(needles)]
        pairs = [(form, topic) for form in _FORMS for topic in _TOPICS]
        random_.shuffle(pairs)
        (form, topic), *others = pairs
        asked = [(form, topic)] * alike + others[: 2 * alike]
        random_.shuffle(asked)
        turns = [(f"Write a {form} about {topic}.", prose(random_, characters)) for form, topic in asked]
        pieces = [piece for request, piece in turns if request == f"Write a {form} about {topic}."]
        which = random_.randrange(alike)
        prefix = "".join(random_.choice("abcdefghjkmnpqrstuvwxyz23456789") for _ in range(12))
        chat = [
            {"role": role, "content": text}
            for turn in turns
            for role, text in zip(("user", "assistant"), turn, strict=True)
        ]
        asks = f"Prepend {prefix} to {form} number {which + 1} about {topic}, and give it back with nothing else."
        chat.append({"role": "user", "content": asks})
        rows.append(
            {
                "prompt": json.dumps(chat),
                "answer": prefix + pieces[which],
                "random_string_to_prepend": prefix,
                "n_needles": alike,
                "desired_msg_index": chat.index({"role": "assistant", "content": pieces[which]}),
                "total_messages": len(chat),
                "n_chars": sum(len(message["content"]) for message in chat),
            }
        )
    return rows


def write(rows: Sequence[Row], path: Path, tokens: Sequence[int] | None = None) -> Path:
    """The rows as JSON lines, and, with ``tokens`` of each, the table of lengths beside them: as if they had been
    counted. Returns ``path``."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    if tokens is not None:
        table = Table(data_sha256=hashlib.sha256(path.read_bytes()).hexdigest(), tokens=dict(enumerate(tokens)))
        path.with_name(f"{path.name}.{ENCODING}.json").write_bytes(msgspec.json.encode(table))
    return path
