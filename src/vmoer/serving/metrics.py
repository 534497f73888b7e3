"""What the server has seen, on vLLM's own `/metrics`: every request counts, whether it asked for its uncertainty or not.

vmoer_sequence{signal}      histogram of an answer's mean of each signal
vmoer_first_token{signal}   histogram of each signal where the first token was chosen: what the model made of the prompt
vmoer_answers_total         finished answers
vmoer_judged_total          those that were held against the threshold, where the server has one
vmoer_abstained_total       those above it
"""

from prometheus_client import Counter, Histogram

from vmoer.serving.values import Threshold, Values, sequence

# novelty and variances span orders of magnitude
_BUCKETS = tuple(round(10 ** (power / 4), 6) for power in range(-16, 13))
_sequence = Histogram("vmoer_sequence", "Mean of a signal over an answer's tokens", ["signal"], buckets=_BUCKETS)
_first = Histogram(
    "vmoer_first_token", "A signal where an answer's first token was chosen", ["signal"], buckets=_BUCKETS
)
_answers = Counter("vmoer_answers", "Finished answers")
_judged = Counter("vmoer_judged", "Answers held against the threshold")
_abstained = Counter("vmoer_abstained", "Answers above the threshold")


def observe(tokens: Values, threshold: Threshold | None) -> None:
    """Count a finished answer."""
    scores = sequence(tokens)
    for name, values in tokens.items():
        if values:
            _sequence.labels(name).observe(scores[f"mean_{name}"])
            _first.labels(name).observe(values[0])
    _answers.inc()
    if threshold is not None:
        judge(threshold.verdict(tokens))


def judge(verdict: Values) -> None:
    """Count what the threshold said of an answer, where it said anything."""
    if "abstain" in verdict:
        _judged.inc()
        _abstained.inc(verdict["abstain"])
