"""Prompts for training a draft head, and held-out prompts from other templates about other subjects.

The training prompts are templates filled with words, so a few pages of text give tens of thousands of distinct prompts.
All of it was written for this project. A head learns from the target's answers, so the prompts only need to cover many
kinds of text. `HELD_OUT` shares no template and no subject with them; `tests/test_training.py` checks that.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

SUBJECTS = """
honey bees|volcanoes|the water cycle|bread baking|chess|solar panels|the human heart|coral reefs|medieval castles|
penguins|black holes|public libraries|railways|photosynthesis|jazz music|earthquakes|vaccines|electric cars|
the Roman Empire|tea|gardening|budgeting|meditation|machine learning|databases|glaciers|soccer|watercolour painting|
dinosaurs|recycling|the immune system|knitting|coffee|deserts|mountain climbing|bridges|the printing press|
sleep|dogs|cats|horses|owls|elephants|spiders|rain forests|rivers|tornadoes|gravity|magnets|atoms|light|sound|
the periodic table|vitamins|exercise|swimming|running|cycling|basketball|tennis|photography|film making|theatre|
opera|the violin|guitars|drums|poetry|novels|fairy tales|newspapers|radio|television|the telephone|the internet|
computer viruses|encryption|passwords|spreadsheets|programming|Python|JavaScript|operating systems|robots|
3D printing|batteries|wind turbines|nuclear power|oil|steel|glass|paper|cotton|silk|wool|leather|gold|diamonds|
money|banks|taxes|insurance|the stock market|inflation|trade|farming|wheat|rice|potatoes|tomatoes|apples|cheese|
chocolate|pasta|soup|salads|spices|salt|sugar|restaurants|hotels|airports|bicycles|trams|highways|maps|
compasses|clocks|calendars|weather forecasts|clouds|snow|thunderstorms|seasons|the moon|Mars|Jupiter|comets|
telescopes|microscopes|cells|DNA|evolution|bacteria|fungi|mushrooms|oak trees|roses|cacti|grass|soil|compost|
schools|universities|homework|exams|teachers|job interviews|meetings|teamwork|leadership|time management|
public speaking|negotiation|friendship|birthdays|weddings|holidays|camping|picnics|board games|puzzles|video games|
museums|sculpture|architecture|pyramids|the Middle Ages|the Renaissance|the Industrial Revolution|democracy|
elections|constitutions|courts|human rights|philosophy|ethics|logic|probability|geometry|algebra|fractions|
prime numbers|statistics|languages|grammar|spelling|dictionaries|translation|handwriting|memory|dreams|
emotions|habits|stress|happiness|anxiety|nutrition|allergies|headaches|first aid|hospitals|dentists|eyes|skin|bones
""".replace("\n", "").split("|")
PEOPLE = """
Anna|Ben|Carla|David|Elena|Farid|Grace|Hugo|Ines|Jamal|Kira|Leo|Maya|Noah|Olga|Pedro|Quinn|Rosa|Samir|Tara|Uma|
Victor|Wendy|Xavier|Yuki|Zoe
""".replace("\n", "").split("|")
PLACES = """
a small village|a big city|a quiet valley|an old castle|a space station|a busy market|a school|a forest cabin|
a mountain hut|a hospital|a farm|a train|a museum|a desert town|a snowy town|a bakery|a laboratory|a library
""".replace("\n", "").split("|")
ROLES = """
a doctor|a farmer|a detective|an inventor|a dragon|a robot|a baker|a student|a queen|a painter|a gardener|a wizard|
a journalist|a musician|an astronaut|a talking cat|a mail carrier|a chess player
""".replace("\n", "").split("|")
JOBS = """
adds two numbers|reverses a string|checks whether a number is prime|counts the vowels in a text|
finds the largest number in a list|sorts a list of numbers|computes the factorial of a number|
removes duplicates from a list|checks whether a word is a palindrome|counts the words in a sentence|
computes the mean of a list|merges two dictionaries|converts Celsius to Fahrenheit|computes Fibonacci numbers|
reads a text file line by line|writes a list to a CSV file|finds all even numbers in a list|flattens a nested list|
computes the greatest common divisor|searches a sorted list by bisection|capitalises every word|
validates an email address|rolls two dice|shuffles a deck of cards|counts the letters of a text|
transposes a matrix|multiplies two matrices|parses a date|formats a price|computes compound interest|
finds the shortest word|splits a bill between friends|converts seconds to hours and minutes|
prints a multiplication table|draws a triangle of stars|converts a number to binary|generates a random password
""".replace("\n", "").split("|")
TONGUES = ["Python", "JavaScript", "C", "Java", "Rust", "Go", "Bash", "SQL", "TypeScript"]
THINGS = """
pen|lamp|chair|window|bottle|jacket|umbrella|basket|mirror|pillow|ladder|bucket|candle|blanket|hammer|spoon|
notebook|backpack|camera|carpet|shelf|kettle|towel|scarf
""".replace("\n", "").split("|")
VERBS = """
clean|paint|repair|sell|wash|count|pack|polish|borrow|measure|collect|return
""".replace("\n", "").split("|")

_LINES = """
What is {subject}?
What are the basics of {subject}?
Explain {subject} to a child.
Explain {subject} in detail.
Why does {subject} matter?
How does one learn about {subject}?
What are common myths about {subject}?
Give me {n} facts about {subject}.
Write {n} tips about {subject}.
List {n} examples related to {subject}.
Summarise the history of {subject}.
Compare {subject} and {subject2}.
What do {subject} and {subject2} have in common?
Is {subject} more important than {subject2}? Argue both sides.
What are the advantages and disadvantages of {subject}?
Describe {subject} in one paragraph.
Describe {subject} in {n} sentences.
I know nothing about {subject}. Where do I start?
Define {subject}.
What questions would an expert on {subject} ask?
How will {subject} change in the future?
Make a glossary of {n} words about {subject}.
Who should care about {subject}, and why?
What is the difference between {subject} and {subject2}?
Give an example that shows how {subject} works.
Write an essay about {subject}.
Write an introduction for an article about {subject}.
Write a blog post about {subject} and {subject2}.
Write a lesson plan about {subject}.
Make a quiz with {n} questions about {subject}, with answers.
Write an outline for a talk about {subject}.
Write a product description for a {thing}.
Write an advertisement for a {thing}.
Write an email to {person} about {subject}.
Write a polite email asking {person} to return my {thing}.
Write a thank-you note to {person} for the {thing}.
Write a review of a book about {subject}.
Write a news report about {subject} in {place}.
Write a speech about {subject}.
Write a table that compares {subject} and {subject2}.
Write a report on {subject} with headings.
Write step by step instructions to {verb} a {thing}.
Make a checklist to {verb} {n} things in {place}.
Write a story about {role} in {place}.
Write a story in which {person} meets {role}.
Write a poem about {subject}.
Write a haiku about {subject}.
Write a song about {role}.
Write a dialogue between {person} and {role} about {subject}.
Write a conversation in which {person} explains {subject} to {person2}.
Continue this story: {person} opened the door of {place} and saw {role}.
Continue: Once upon a time there was {role} who wanted to learn about {subject}.
Invent a character who lives in {place} and loves {subject}.
Tell me a joke about {subject}.
Write a diary entry of {role} in {place}.
Write the first page of a novel about {subject}.
Write a {tongue} function that {job}.
Write a {tongue} program that {job}.
Show me how to write code that {job} in {tongue}.
Explain how a program that {job} works.
Write tests for a {tongue} function that {job}.
Write a {tongue} class with a method that {job}.
Write a {tongue} script that {job} and then {job2}.
{person} has {n} {thing}s and buys {m} more. How many {thing}s does {person} have now?
A {thing} costs {n} dollars. How much do {m} {thing}s cost?
What is {n} plus {m}?
What is {m} times {n}?
{person} shares {m} {thing}s between {n} friends. How many does each friend get?
It takes {n} hours to {verb} a {thing}. How long does it take to {verb} {m} of them?
Repeat the following words in the same order: {words}.
Sort these words by the alphabet: {words}.
Repeat this line {n} times: the {thing} of {person} is in {place}.
Turn this into a numbered list: {words}.
Make a sentence out of these words: {words}.
Rewrite politely: I want my {thing} back, {person}.
Rewrite in the past tense: {person} and {person2} {verb} the {thing} in {place}.
Translate into French: {person} likes {subject}.
Correct this sentence: {person} have {verb}ed the {thing} since {n} days.
Extract the names: {person} and {person2} talked about {subject} in {place}.
Classify each word as living or not living: {words}.
Write this as JSON: name {person}, item {thing}, count {n}.
How do I {verb} a {thing}?
I am {role}. What should I know about {subject}?
I need to {verb} {n} {thing}s today. Plan my day.
Suggest a gift for {person}, who likes {subject}.
Recommend a hobby to someone who likes {subject}.
What could go wrong when I {verb} a {thing}?
I am afraid of {subject}. What can I do?
My friend {person} disagrees with me about {subject}. What should I say?
Help me to plan a day in {place}.
Brainstorm {n} names for a shop that sells {thing}s.
"""
_BLOCKS = (
    "Output the following table again with one more row:\n\n| Name | Item | Count |\n|---|---|---|\n"
    "| {person} | {thing} | {n} |\n| {person2} | {thing2} | {m} |",
    "Print this text unchanged:\n\n{person} went to {place} to {verb} a {thing}. There {person} met {person2}, who had "
    "come to {verb} a {thing2}. They talked about {subject} and about {subject2} until it was dark.",
    "Finish this list:\n\n1. {verb} the {thing}\n2. {verb} the {thing2}\n3.",
    "Give this Python code type hints:\n\n```python\ndef {verb}({thing}, {thing2}):\n    total = 0\n"
    "    for item in {thing}:\n        if item > {n}:\n            total += item * {thing2}\n    return total\n```",
    "Rename `{thing}` to `{thing2}` in this code:\n\n```js\nconst {thing} = load({n});\nif ({thing}.length > {m}) {{\n"
    "  {verb}({thing});\n}}\nconsole.log({thing});\n```",
    "Here are my notes:\n- {subject}\n- {verb} the {thing}\n- call {person}\n\nMake a tidy list out of them.",
)
TEMPLATES = (*_LINES.strip().splitlines(), *_BLOCKS)

HELD_OUT = (
    # each of a different kind, about subjects that no training prompt has
    "Why is the sky blue?",
    "Tell me about lighthouses.",
    "Which animals live in the Arctic ocean?",
    "How do ships stay afloat?",
    "What should I pack for a week on a sailing boat?",
    "Could you explain what a haemoglobin molecule does?",
    "What makes a good neighbour?",
    "Give a short biography of Marie Curie.",
    "Name the capital of Australia and say what it is known for.",
    "Name three inventions from ancient China and say what each was for.",
    "How can a small bakery attract more customers?",
    "Please write a letter to the harbour master in which I apply for a berth.",
    "Draft a complaint about a parcel that arrived broken.",
    "Tell a tale of a lighthouse keeper and a whale.",
    "Let a kettle and a toaster argue about who is more useful.",
    "Compose four rhyming lines on the sea at night.",
    "Imagine a planet on which it never gets dark. How would people live there?",
    "Implement a queue with two stacks in Python.",
    "What does `git rebase` do, and when is it dangerous?",
    "Show a regular expression for a phone number and say what each part means.",
    "Write HTML for a page with a heading, a picture and a form.",
    "Find the mistake: for i in range(10): print(i",
    "A ferry leaves at 9:40 and arrives at 11:15. How long is the crossing?",
    "If 3 sailors eat 12 biscuits in 2 days, how many do 5 sailors eat in 4 days?",
    "Shorten this text: The old lighthouse on the cliff, which had been built more than a hundred years ago by three "
    "brothers who were masons, was going to be closed, because ships now find their way by satellite.",
    "Answer yes or no and then say why: can whales breathe under water?",
    "Give the opposite of each of these: hot, early, rough, generous, transparent.",
    "Put the planets in order of their distance from the sun.",
    "I keep losing my keys. Any ideas?",
    "Pretend that you are a tour guide in Lisbon and welcome a group.",
    "How do I make pancakes without eggs?",
    "What are the symptoms of a cold, and when should I see somebody about it?",
    "Explain the offside rule as briefly as you can.",
    "Who wrote Don Quixote, and what happens in it?",
    "Suggest a three-course vegetarian dinner for six guests.",
    "Make up a riddle whose answer is an anchor.",
    "Convert 5 nautical miles to kilometres and show the calculation.",
    "Write the rules of hide and seek for someone who has never played it.",
    "What would you see on a walk along a beach at low tide?",
    "Set out the steps of changing a flat tyre.",
)
"""Prompts that are never trained on."""


def training_prompts(seed: int) -> Iterator[str]:
    """Yield distinct prompts without end; only `seed` determines them. Templates are used in rotation."""
    rng, seen = random.Random(seed), set()
    for template in itertools.cycle(TEMPLATES):
        prompt = _fill(template, rng)
        if prompt not in seen:
            seen.add(prompt)
            yield prompt


def _fill(template: str, rng: random.Random) -> str:
    subject, subject2 = rng.sample(SUBJECTS, 2)
    person, person2 = rng.sample(PEOPLE, 2)
    thing, thing2 = rng.sample(THINGS, 2)
    job, job2 = rng.sample(JOBS, 2)
    return template.format(
        subject=subject, subject2=subject2, person=person, person2=person2, thing=thing, thing2=thing2, job=job,
        job2=job2, place=rng.choice(PLACES), role=rng.choice(ROLES), tongue=rng.choice(TONGUES),
        verb=rng.choice(VERBS), n=rng.randint(2, 12), m=rng.randint(3, 60),
        words=", ".join(rng.sample(THINGS + PEOPLE, rng.randint(4, 9))),
    )  # fmt: skip
