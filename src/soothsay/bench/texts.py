"""Texts that the benchmarks use as prompts: a question, a passage to summarize, and topics."""

from __future__ import annotations

QUESTION = "Tell me a story about a river, a bridge and a town."
PASSAGE = (
    "The river Alder rises in the hills north of Marden and flows for forty miles through farmland before "
    "it meets the sea at Kelby. In spring the river floods the low meadows, and farmers move their cattle "
    "to higher ground. The bridge at Marden was built in 1887 by the county to replace a wooden bridge "
    "that had been washed away twice. Today the bridge carries more traffic than the county ever planned "
    "for, and the council wants to build a second bridge two miles downstream. Farmers say that a second "
    "bridge would cut through the low meadows, and that the river would flood the road in spring."
)
TOPICS = (
    "cats dogs fish birds cows pigs rats bats trees rain snow wind fire iron gold salt sand wool silk "
    "corn rice milk bread soup tea cups maps ships roads bells clocks stars"
)
"""32 words."""
