"""The words of the world: in the demo's tokenizer each of them is one token."""

# fmt: off
GIVEN = (
    "Ada", "Bruno", "Cora", "Dimas", "Edda", "Fabio", "Gala", "Hugo", "Ilse", "Jonas", "Kira", "Lorens", "Mira",
    "Nilo", "Olga", "Pavel", "Quita", "Rufus", "Selma", "Timo", "Ursa", "Vito", "Wanda", "Xenia", "Yuri", "Zelda",
    "Anton", "Berta", "Cyrus", "Delia", "Emil", "Freya", "Gustav", "Hedda", "Igor", "Judit", "Kasper", "Livia",
    "Milo", "Nadja",
)
FAMILIES = (
    "Abel", "Brandt", "Corvo", "Dahl", "Egger", "Falk", "Grau", "Holm", "Iversen", "Jansen", "Krol", "Lund", "Moro",
    "Novak", "Orban", "Prinz", "Quist", "Rossi", "Sand", "Toth", "Ulmer", "Voss", "Weber", "Yilmaz", "Zauner",
    "Amsel", "Birk", "Costa", "Dorn", "Erba", "Fuchs", "Gallo",
)
# fmt: on
RELATIONS = ("scares", "calms", "guards", "amuses", "follows", "wakes", "warms", "fools")
ANIMALS = ("otter", "heron", "lynx", "vole", "raven", "marten", "toad", "stork", "weasel", "badger", "carp", "finch")

# The far shift speaks of something else: ships, their home ports, and goods.
# fmt: off
SHIPS = (
    "Aurora", "Boreas", "Caspian", "Delphin", "Eos", "Fulmar", "Gannet", "Halcyon", "Icarus", "Juno", "Kestrel",
    "Leander", "Meteor", "Nautilus", "Orion", "Petrel", "Quasar", "Rigel", "Sirius", "Triton",
)
# fmt: on
PORTS = ("Arvik", "Belmar", "Calda", "Durrow", "Elsund", "Fenwick", "Garonne", "Hythe", "Inver", "Jaffa")
EFFECTS = ("fills", "funds", "trims", "stains", "delays", "ballasts", "perfumes", "burdens")
GOODS = ("salt", "silk", "amber", "copper", "wool", "indigo", "barley", "pepper", "timber", "resin", "cotton", "marble")

WORDS = (*GIVEN, *FAMILIES, *RELATIONS, *ANIMALS, *SHIPS, *PORTS, *EFFECTS, *GOODS)
