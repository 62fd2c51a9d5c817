"""The ingredients of the generated task `intents`: guests who write to the desk of a hotel."""

from __future__ import annotations

from typing import NamedTuple


class Topic(NamedTuple):
    """An intent: a label that describes it, a word that goes with it, and eight ways to say it."""

    descriptive: str
    associated: str
    phrasings: tuple[str, ...]


COLOURS = tuple(
    "red blue green gold silver pink orange purple brown black white gray violet copper olive coral".split()
)

OPENERS = (
    "",
    "",
    "",
    "Hi, ",
    "Hello, ",
    "Excuse me, ",
    "Quick question: ",
    "Good morning, ",
    "Sorry, ",
    "One more thing: ",
)

FILLERS = {
    "when": tuple(
        "today|tonight|last night|on Monday|on Friday|after lunch|before dinner|this morning|this weekend|at noon".split(
            "|"
        )
    ),
    "who": tuple(
        "my wife|my husband|a colleague|our guide|a friend|my son|my aunt|my boss|our neighbour|my sister".split(
            "|"
        )
    ),
}

TOPICS = (
    Topic(
        "internet",
        "cable",
        (
            "the internet keeps dropping {when}",
            "what is the router password",
            "{who} cannot connect the tablet to the network",
            "the wifi signal is weak upstairs",
            "web pages load slowly {when}",
            "is there a socket for my laptop",
            "{who} needs more bandwidth for a video call",
            "how do I get online here",
        ),
    ),
    Topic(
        "towels",
        "cotton",
        (
            "we need fresh towels {when}",
            "the bed sheets have a stain",
            "{who} would like a softer pillow",
            "please bring us another blanket",
            "nobody changed our duvet {when}",
            "there is no bath mat",
            "{who} dropped the robe in the tub",
            "can you swap the old linen",
        ),
    ),
    Topic(
        "breakfast",
        "toast",
        (
            "what time is breakfast served {when}",
            "do you have gluten free bread",
            "{who} wants eggs without bacon",
            "is coffee included in the buffet",
            "can I order porridge {when}",
            "where do we find the cereal",
            "{who} is allergic to nuts and milk",
            "may I take fruit with me",
        ),
    ),
    Topic(
        "parking",
        "asphalt",
        (
            "where can I park the car {when}",
            "is the garage locked after dark",
            "{who} has a van with a trailer",
            "can I charge an electric vehicle",
            "the barrier did not lift {when}",
            "do motorcycles fit in the basement",
            "{who} left the headlights on",
            "how do I reach the lower deck",
        ),
    ),
    Topic(
        "key card",
        "plastic",
        (
            "my key card stopped working {when}",
            "the door will not unlock",
            "{who} snapped the pass in two",
            "the handle is jammed again",
            "we were shut out again {when}",
            "the lock keeps on blinking",
            "{who} mislaid the chip for room nine",
            "what is the code of the safe",
        ),
    ),
    Topic(
        "noise",
        "thunder",
        (
            "the people next door were loud {when}",
            "music is coming through the wall",
            "{who} could not sleep beside the lift",
            "someone is shouting in the corridor",
            "the builders drilled for hours {when}",
            "the fan makes a rattling sound",
            "{who} complains about the party above us",
            "can you quiet the bar downstairs",
        ),
    ),
    Topic(
        "checkout",
        "farewell",
        (
            "we would like to check out late {when}",
            "when must we vacate the suite",
            "{who} has to depart before sunrise",
            "how does the express exit work",
            "may I extend my booking {when}",
            "is reception staffed at dawn",
            "{who} flies home a day early",
            "can we stay one extra night",
        ),
    ),
    Topic(
        "taxi",
        "meter",
        (
            "please call a taxi {when}",
            "how far is the airport",
            "{who} needs a ride to the station",
            "is there a shuttle to the fair",
            "can a limousine collect us {when}",
            "what does a cab downtown cost",
            "{who} missed the last bus",
            "do you know a reliable driver",
        ),
    ),
    Topic(
        "luggage",
        "leather",
        (
            "can you store our suitcases {when}",
            "my backpack strap is torn",
            "{who} left a handbag in the hall",
            "we need help with heavy trunks",
            "the porter forgot a box {when}",
            "could I have a trolley for these",
            "{who} expects a parcel by courier",
            "where is the baggage room",
        ),
    ),
    Topic(
        "heating",
        "winter",
        (
            "the room was freezing {when}",
            "how do I turn up the radiator",
            "{who} finds the air too hot",
            "the thermostat shows an error",
            "the cooling unit broke {when}",
            "there is no warm water left",
            "{who} wants the boiler checked",
            "the window lets in a draught",
        ),
    ),
    Topic(
        "bill",
        "paper",
        (
            "I was charged twice over {when}",
            "can I pay with cash instead",
            "{who} wants an invoice for the company",
            "what is this fee on my statement",
            "please refund the deposit {when}",
            "do you accept foreign currency",
            "{who} used the minibar by mistake",
            "the total looks wrong to me",
        ),
    ),
    Topic(
        "pool",
        "chlorine",
        (
            "is the swimming pool open {when}",
            "how deep is the far end",
            "{who} forgot to pack a swimsuit",
            "do you rent out goggles",
            "are diving lessons held {when}",
            "where do I find a sunbed",
            "{who} slipped near the sauna",
            "is there a lifeguard on duty",
        ),
    ),
    Topic(
        "gym",
        "sweat",
        (
            "can I use the gym {when}",
            "the treadmill is out of order",
            "{who} would rather lift weights",
            "do you offer yoga classes",
            "is a fitness trainer available {when}",
            "where are the exercise bikes kept",
            "{who} asked for a rowing machine",
            "are the dumbbells put away",
        ),
    ),
    Topic(
        "medical help",
        "bandage",
        (
            "I felt quite dizzy {when}",
            "where is the nearest pharmacy",
            "{who} has had a high fever",
            "please send for an ambulance",
            "I must see a doctor {when}",
            "do you have plasters for a cut",
            "{who} has twisted an ankle",
            "my stomach hurts very badly",
        ),
    ),
    Topic(
        "sights",
        "postcard",
        (
            "which museum is worth a visit {when}",
            "do you have a city map",
            "{who} wants tickets for the opera",
            "where does the walking tour start",
            "can we see the castle {when}",
            "how old is the great cathedral",
            "{who} would love a boat trip",
            "what is a good viewpoint for photos",
        ),
    ),
    Topic(
        "pets",
        "fur",
        (
            "may our dog come along {when}",
            "do you sell any cat food",
            "{who} is scared of the parrot",
            "where can I walk a puppy",
            "the hamster escaped {when}",
            "is there a vet nearby",
            "{who} needs a cage for a rabbit",
            "do animals cost anything extra",
        ),
    ),
)
