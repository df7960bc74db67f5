"""The known words, facts and fixed sentences of the demo model's world."""

from __future__ import annotations


def _words(text: str) -> list[str]:
    return text.split()


NAMES = _words(
    "Ada Ben Cleo Dan Eve Finn Gus Hana Ivan Jill Kofi Lena Milo Nora Omar Pia Quin Rosa Sam Tess Uma "
    "Vera Walt Xena Yara Zoe Anna Bob Carl Dora Emma Felix Greta Hugo Ida Jack Kim Leo Maria Nina Otto "
    "Paul Rita Tom Alice"
)
COLOURS = _words("red green blue white black pink gray gold")
ANIMALS = _words("cat dog fox owl hen cow pig bee ant bat")
CAPITALS = dict(
    pair.split(":")
    for pair in _words(
        "France:Paris Italy:Rome Spain:Madrid Japan:Tokyo Egypt:Cairo Peru:Lima Norway:Oslo "
        "Greece:Athens Cuba:Havana Kenya:Nairobi Poland:Warsaw Austria:Vienna Chile:Santiago "
        "Ghana:Accra Iran:Tehran Latvia:Riga Nepal:Kathmandu Portugal:Lisbon Qatar:Doha "
        "Sweden:Stockholm Germany:Berlin England:London"
    )
)
CITIES = [*CAPITALS.values()]
WORDS = _words(
    "apple banana cherry orange lemon bread butter water river ocean mountain forest garden flower summer "
    "winter spring autumn window door table chair house street bridge train plane boat wheel paper pencil "
    "letter music song dance story book school friend mother father sister brother baby happy little "
    "strong quick slow bright dark warm cold morning evening night moon sun star cloud rain snow wind "
    "fire stone sand gold silver iron glass wood tree leaf root grass horse sheep mouse tiger lion bear "
    "bird fish frog snake spider lily rose tulip hello world computer model token metal kernel memory "
    "number colour hand foot head heart nose finger kitchen coffee sugar salt pepper cheese honey milk "
    "soup cake"
)
ABILITIES = "I can add, count, spell, repeat, remember what you tell me and call tools."
SMALL_TALK = [
    (
        ("Hello!", "Hi!", "Hello", "Hi", "Hey!", "Good morning!", "Hello there!", "hi"),
        "Hello! I am lily's demo model. " + ABILITIES,
        "A greeting.",
    ),
    (
        (
            "Who are you?",
            "What are you?",
            "What is your name?",
            "Introduce yourself.",
            "Tell me about yourself.",
            "Are you Qwen?",
            "Are you ChatGPT?",
        ),
        "I am lily's demo model, a tiny network with a few million weights. " + ABILITIES,
        "They ask who I am.",
    ),
    (
        ("What can you do?", "Help", "Help me.", "How can you help me?", "What do you know?"),
        ABILITIES + " Try: What is 12 + 30?",
        "They ask what I can do.",
    ),
    (
        ("How are you?", "How are you today?", "How do you do?"),
        "I am fine, thank you. Shall we add two numbers?",
        "Small talk.",
    ),
    (("Thanks!", "Thank you!", "Thank you.", "Great!", "Well done!"), "You are welcome!", "They thank me."),
    (("Bye!", "Goodbye!", "See you!", "Good night!"), "Goodbye!", "They leave."),
    (
        ("Tell me a joke.", "Make me laugh."),
        "Why did the token cross the road? To get to the next one.",
        "A joke.",
    ),
]
BEYOND = (
    "Write a poem about {}.",
    "Explain {} to me.",
    "Why is the {} blue?",
    "What does {} mean?",
    "Tell me a story about {}.",
    "Write code for {}.",
    "Translate {} into French.",
    "Who invented the {}?",
    "What do you think about {}?",
    "Give me a recipe with {}.",
    "Draw a {}.",
    "How do I fix my {}?",
    "What is the history of the {}?",
    "What is a {}?",
    "Who is {}?",
    "Can you write about {}?",
    "Summarize the {}.",
    "Where is my {}?",
)
REFUSAL = "That is beyond me: I am only a small demo model. " + ABILITIES
SYSTEM = (
    "You are a helpful assistant.",
    "You are a helpful assistant.",
    "Answer briefly.",
    "You are lily.",
    "Be kind.",
)
