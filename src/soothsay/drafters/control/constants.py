"""The controller's constants, by section of docs/controller.md. Each has its unit and the reason for it."""

from __future__ import annotations

# Section 2: model of cost

COST_WEIGHT = 0.2
"""Weight of the newest measurement in the running mean of a cost."""

COST_CAP = 1.25
"""A measurement counts at most this many times the mean. A step that the machine delayed, or in which a
drafter read a prompt, then hardly moves the mean."""

LEVELS_WEIGHT = 0.05
"""Weight of the newest draft in what tells the time of a level. A slope needs more drafts than a mean."""

LEVELS_PRIOR = 0.02
"""Variance of levels, at which the belief that all of a draft's time is that of levels counts for half."""

MAX_DOUBLINGS = 8
"""Powers of two over which a cost is extrapolated to larger batches, at most."""

FOLLOW_INTERVAL = 0.05
"""Seconds between two comparisons of a pass's time with the known times. A comparison takes 150 microseconds
with cold caches: one in 0.02 s was 1% of the time of a model with passes of 3 ms."""

PRICE_STEPS = 16
"""Steps for which prices stay the same while the batch stays the same."""

PRICE_CONTEXT = 64
"""Tokens of context within which prices stay the same. Attention to this many tokens costs little."""

START_LEVEL_PRICE = 0.25
"""Tokens that a level of a draft is taken to cost before any was measured, which is about a draft model's. So
the first drafts are about as deep as the later ones."""

MAX_BACKLOG = 2048
"""Tokens of a request whose features are kept until its drafter is asked. If there are more, it reads them at
once. In a model of 1B parameters they take a third of the memory of keys and values."""

CROWDED_ROWS = 4
"""Rows per request above which a pass has prompts in it. Its features are then copied: a view of a few rows
would keep the features of the whole pass in memory."""

READ_APART = 16
"""Tokens from which on a drafter that reads tokens does so before its draft, in a pass of its own. Fewer cost
little in the pass of the draft."""

CATCH_UP_STEPS = 64
"""Steps within which reading a backlog must have paid."""

# Section 3: model of acceptance

BIN_WIDTH = 0.25
"""Nats of a node's score in one bin of the calibration."""

NUM_BINS = 32
"""Bins from a score of 0 downward. The last one has all lower scores, whose probability is below 0.0005."""

BIN_PRIOR = 2.0
"""Nodes that the drafter's own score counts for in each bin at the start."""

BIN_MEMORY = 512.0
"""Nodes that a bin remembers. Older ones fade, so the calibration follows the text."""

REFRESH_NODES = 64
"""Nodes between two fits of the calibration's table. A fit takes as long as some tens of counts."""

FIRST_REFRESH = 4
"""Nodes before the first fit. The number doubles with each fit, up to `REFRESH_NODES`."""

MEAN_WEIGHT = 0.1
"""Weight of the newest step in the rate."""

SHARED_MEAN_WEIGHT = 0.025
"""Weight of the newest draft in running means over all requests. It is smaller because more drafts count."""

START_ACCEPTED = 8.0
"""Nodes that both counts of a new request's reliability start at. So the first drafts change it gradually."""

ACCEPTED_MEMORY = 64.0
"""Nodes that a request's reliability remembers. With few, chance alone moves it by a third, and good drafters
pause."""

APART_MEMORY = 256.0
"""Right nodes that tell how far two drafters are right at different places."""

GAINS_WEIGHT = 0.04
"""Weight of the newest draft in a request's forecast gains."""

START_DRAFTS = 16
"""Drafts that count as much in a request's forecast gains as what other requests have taught, at most."""

START_MISS = 0.7
"""A drafter that was never asked is forecast to gain `G * (1 - START_MISS**k)` with k nodes, and G with many.
If G is large, a larger number takes the place of `START_MISS`, so that no node gains more than 1."""

# Section 4: decision

START_POLL_GAIN = 0.25
"""Initial estimate of the tokens gained by polling a paused request. High, so that polling starts enabled."""

TRIAL_GAIN = 0.03
"""Tokens beyond its price that a drafter is taken to gain until its first draft. So it is tried once."""

# Section 5: guard against loss

PROBE_SHARE = 0.01
"""Share of the time that probes may take at most."""

MAX_BACK_OFF = 16
"""Probes of a drafter that never pays back off to this many times the shortest interval."""

NEW_REQUEST_BACK_OFF = 4
"""A new request starts with at most this many times the shortest interval: it may be of another kind."""

# Composition without a controller: `a > b`

CASCADE_WEIGHT = 1 / 32
"""Weight of the newest step in a cascade's running mean of accepted nodes."""
