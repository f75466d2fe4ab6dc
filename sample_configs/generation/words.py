"""Numbers, dates, times and prices, and how they are read aloud."""

import random

ONES = [
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"),
    *("eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen"),
    "nineteen",
]
TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
MONTHS = [
    *("january", "february", "march", "april", "may", "june", "july", "august", "september"),
    *("october", "november", "december"),
]
ORDINALS = {"one": "first", "two": "second", "three": "third", "five": "fifth", "eight": "eighth"}
ORDINALS |= {"nine": "ninth", "twelve": "twelfth", "twenty": "twentieth", "thirty": "thirtieth"}


def number(n):
    """Below a million: one hundred and five thousand and twelve."""
    if n < 20:
        return ONES[n]
    if n < 100:
        return " ".join([TENS[n // 10 - 2], *([ONES[n % 10]] if n % 10 else [])])
    unit, name = (1000, "thousand") if n >= 1000 else (100, "hundred")
    rest = n % unit
    joint = ["and"] if 0 < rest < 100 else []
    return " ".join([number(n // unit), name, *joint, *([number(rest)] if rest else [])])


def ordinal(n):
    *before, last = number(n).split()
    return " ".join([*before, ORDINALS.get(last, f"{last}th")])


def year(n):
    if n % 1000 < 10:
        return number(n)
    century, rest = divmod(n, 100)
    if rest == 0:
        return f"{number(century)} hundred"
    return f"{number(century)} {'oh ' if rest < 10 else ''}{number(rest)}"


def clock(hour, minute):
    part = "morning" if hour < 12 else "afternoon" if hour < 18 else "evening"
    if minute > 30:
        hour = (hour + 1) % 24
    name = number((hour - 1) % 12 + 1)
    near = {0: "", 15: "quarter past ", 30: "half past ", 45: "quarter to "}
    if minute in near:
        return f"{near[minute]}{name} in the {part}"
    told = f"{number(minute)} past" if minute < 30 else f"{number(60 - minute)} to"
    return f"{told} {name} in the {part}"


def draw(source):
    """Return what is written, and how it is read."""
    kind = source.choice(["number", "date", "time", "price"])
    if kind == "number":
        n = source.randrange(10 ** source.randint(2, 6))
        return f"{n:,}", number(n)
    if kind == "date":
        day, month, n = source.randint(1, 28), source.randint(1, 12), source.randint(1700, 2099)
        return f"{day}/{month}/{n}", f"the {ordinal(day)} of {MONTHS[month - 1]} {year(n)}"
    if kind == "time":
        hour, minute = source.randrange(24), source.randrange(60)
        return f"{hour}:{minute:02}", clock(hour, minute)
    pounds, pence = source.randint(1, 9999), source.randrange(100)
    told = f"{number(pounds)} pound{'s' if pounds > 1 else ''}"
    return f"£{pounds}.{pence:02}", f"{told} {number(pence)}" if pence else told


def pairs(training=1000, selection=400, heldout=1000, seed=0):
    """All different, and no part has any of another."""
    source, found = random.Random(seed), {}
    while len(found) < training + selection + heldout:
        written, read = draw(source)
        found[written] = read
    rows = list(found.items())
    source.shuffle(rows)  # numbers and times repeat, so that the first are richer in them
    ends = training, training + selection
    return {
        "training": rows[: ends[0]],
        "selection": rows[ends[0] : ends[1]],
        "heldout": rows[ends[1] :],
    }
