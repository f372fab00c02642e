"""Whether an event can be the answer to what an attempt was asked.

What a worker sends is data from another machine, which may be broken: an answer that is well formed
may still be to another question, or come twice. A function of the attempt and the event alone.
"""

from collections.abc import Sequence

from archsearch.coordinator.flights import Flight
from archsearch.messages import Evaluated, Event, LatencyPoint, Profile, Profiled, Rung, Stopped


def objection(flight: Flight, event: Event) -> str:
    """Why an event cannot be meant; empty if it can."""
    if isinstance(event, Rung):
        return _to_rung(flight, event)
    if isinstance(event, Evaluated):
        return _to_evaluation(flight, event)
    if isinstance(event, Profiled):
        return _to_profile(flight, event.profile)
    if isinstance(event, Stopped):
        reached = flight.rungs[-1].rung if flight.rungs else None
        if flight.request.peers is None or reached != event.rung:
            return f"it stopped at rung {event.rung}, where it was not to be judged"
    return ""


def _to_rung(flight: Flight, rung: Rung) -> str:
    train, expected = flight.request.train, len(flight.rungs)
    if not flight.request.train_wanted or rung.rung != expected or expected >= train.rungs:
        return f"rung {rung.rung} came where rung {expected} of {train.rungs} was expected"
    members = len(train.member_rates)
    if not len(rung.selection_recall) == len(rung.train_loss) == members:
        return f"rung {rung.rung} is not of {members} members"
    return ""


def _to_evaluation(flight: Flight, event: Evaluated) -> str:
    request, evaluation = flight.request, event.evaluation
    asked = (request.arch.arch_hash, request.recipe_hash)
    if (evaluation.arch_hash, evaluation.recipe_hash) != asked:
        return "its evaluation is of another architecture or another recipe"
    if not request.train_wanted or flight.evaluation is not None:
        return "it sent an evaluation that is known already"
    rates = sorted(member.learning_rate for member in evaluation.members)
    if rates != sorted(request.train.member_rates) or evaluation.learning_rate not in rates:
        return "its evaluation is of other members than were to be trained"
    if any(len(rung.selection_recall) != len(rates) for rung in evaluation.rungs):
        return "a rung of its evaluation is of other members"
    return ""


def _to_profile(flight: Flight, profile: Profile) -> str:
    asked = flight.request.profile
    if flight.evaluation is None or not flight.request.profile_wanted:
        return "it sent a profile where none was expected"
    if profile.arch_hash != flight.request.arch.arch_hash:
        return "its profile is of another architecture"
    measured = (_places(profile.prefill), _places(profile.decode))
    if measured != (asked.prefill, asked.decode):
        return "its profile was measured at other places than were asked for"
    return ""


def _places(points: Sequence[LatencyPoint]) -> tuple[tuple[int, int], ...]:
    return tuple((point.batch, point.context) for point in points)
