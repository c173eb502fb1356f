"""Codes of pairing: three words of a list, said by one machine and typed at another one.

A stranger has three tries for one of 512³ codes, a chance of 1 in 45 million. Two words of the list
differ in two letters at least, so a slip of the hand is found before it costs a try.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence

from ..errors import PairingError, did_you_mean

NUM_WORDS = 3

_LIST = """
acorn actor agent album alder alert alley almond alpaca amber amulet anchor angle anthem antler
apple apron arcade arch arena argon armor arrow artist aspen atlas attic aurora autumn avenue
axle badge bagel baker bamboo banjo barley barn barrel basin basket bazaar beacon beaver beetle
bench berry birch bison blaze board boat bobcat bonnet bonsai book border bottle brass bread
breeze brick bridle bronze broom brush bubble bucket buckle bugle burger burrow butter button
cabin cable cactus camel camera canal candle canoe canyon cargo carpet carrot cashew castle
cedar celery cello chain chalk cherry chess chorus cider cinema circle citrus clay cliff clock
cloud clover clutch coast cobalt cocoa coffee collar colony comet copper coral cotton cougar
cousin coyote crane crater crayon crisp crocus crown cruise cubic cycle cymbal dairy dancer dawn
dazzle decade deer delta denim desert dial dimple dinner dolmen domino donkey dough dragon
drawer dream drum dune dusk dynamo eagle earth easel echo eclair elbow emblem enamel engine
envoy epoch estate fabric fajita falcon family farmer fathom feast fedora fennel fiddle field
fiesta filter finch fjord flagon flame flint flour foam forest fossil frost fruit fudge gadget
galaxy gallop garden garlic garnet gate geyser ginger gizmo glass globe goblet gopher gourd
grape gravel green grotto grove guitar guppy gusto hammer hangar harbor harp haven hazel hedge
helium helmet hermit heron hinge hobby holly honey hoof hotel hubcap hummus husky icicle igloo
impala indigo inlet iris iron island ivory jacket jaguar jaunt jelly jersey jewel jigsaw jingle
jockey juggle juice kayak kernel kettle keypad kimono kiosk kitten kiwi knight koala ladder
ladle lagoon lake lamp laptop lasso laurel lava leaf ledger legend legume lemon lentil lever
lichen lilac linen lion lizard llama locket lotus lumber lunch lute lynx lyric macaw magnet
mallet mango mantle maple marble margin market maroon mascot matrix meadow melon memoir mentor
metal meteor midway mimosa mirror mocha molar moon mosaic moss motor muffin museum music mystic
navy nebula nectar needle nest nickel nomad noodle north novel nugget nutmeg oasis ocean octave
office olive omelet onion opal opera orbit orchid osprey otter oven oxygen oyster paddle pagoda
palace panda papaya parade parcel pastel patio pear pebble pencil pepper pewter piano picnic
pigeon pillow pilot pine pixel planet plaza plum poem pollen poncho pond poplar poppy porch
portal potato powder primer prism proton pulley pulse pupil puppet purple puzzle quarry quartz
quasar quill quiver rabbit radar radish raft rafter rain raisin ranch ravine recipe remedy
ribbon ridge ripple river robin rodeo roster ruby rudder rumble rustic sage sailor salmon sandal
satin saturn scarf scenic school scout seal season sesame shadow shelf shore shovel shrimp
sierra signal silk silver sketch slate sleigh slope smile snow spark sphere spice spider spiral
spoon spring spruce square squid stable stamp star steam stone stork sulfur summer sunset swan
symbol syrup talent tamale tandem tavern teacup teapot temple tennis ticket tiger timber tinsel
tiptoe tomato topaz tower trail tropic tulip tundra tunnel turnip turtle tweed twig umpire uncle
upland urban vacuum valet vase vista wagon water whale wheat wolf wool yacht zebra zinc
"""
WORDS = tuple(_LIST.split())


def new_code() -> str:
    """A new random code, such as ``otter-candle-river``."""
    return "-".join(secrets.choice(WORDS) for _ in range(NUM_WORDS))


def read_code(words: Sequence[str]) -> str:
    """The code in the words of a command line: in one argument or in three, in any case.

    Raises:
        PairingError: If a word is not of the list, or their number is wrong.
    """
    found = [word for word in re.split(r"[\s-]+", " ".join(words).lower()) if word]
    for word in found:
        if word not in WORDS:
            raise PairingError(
                f"{word!r:.40} is not a word of a code.{did_you_mean(word, *WORDS)} Copy the code "
                "as the worker shows it."
            )
    if len(found) != NUM_WORDS:
        raise PairingError(
            f"A code has {NUM_WORDS} words, and this one has {len(found)}; give all words that "
            "the worker shows."
        )
    return "-".join(found)
