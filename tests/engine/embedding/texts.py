"""Fifty texts in several scripts, from one word to some hundred, for comparing embeddings."""

_SENTENCES = (
    "The ferry leaves the harbour at seven and comes back after dark.",
    "Wie spät ist es, und wann fährt der letzte Zug nach Österreich?",
    "La boulangère a gardé deux baguettes pour les voisins du dessus.",
    "El río creció tanto que cubrió el puente de piedra durante tres días.",
    "Il gatto dorme sul tetto mentre la pioggia batte sui vetri.",
    "A chuva parou, mas as ruas continuam cheias de água e de folhas.",
    "Вчера вечером мы долго говорили о старых фильмах и новой музыке.",
    "Η θάλασσα ήταν ήρεμη και ο ουρανός γεμάτος αστέρια.",
    "昨日は雨が降ったので、図書館で一日中本を読んでいました。",
    "今天的天气很好，我们打算去公园散步，然后喝一杯茶。",
    "오늘 아침에는 안개가 너무 짙어서 앞이 보이지 않았다.",
    "غادر القطار المحطة قبل أن يصل المسافرون الأخيرون.",
    "הספר הישן נפל מהמדף ונפתח בעמוד שבו עצרתי לפני שנה.",
    "बच्चे नदी के किनारे पत्थर इकट्ठा कर रहे थे।",
    "Hôm nay trời mát, chúng tôi đi bộ dọc theo bờ hồ.",
    "Dziewczyna zostawiła rower pod płotem i pobiegła do szkoły.",
    "Köpek bahçede uyurken çocuklar sessizce oynadı.",
    "def area(radius): return 3.14159 * radius ** 2  # square metres",
    "SELECT name, COUNT(*) FROM orders WHERE total > 99.50 GROUP BY name;",
    "Meet me @ 5pm?? 🚲🌧️ (bring the *blue* umbrella!!)",
)

_SHORT = (
    "yes",
    "Zürich",
    "42",
    "!",
    "unbelievable",
    "東京",
    "naïve café",
    "e = mc²",
    "  padded  ",
    "[brackets] {braces} <angles>",
)


def reference_texts() -> list[str]:
    """Short ones, sentences, some in upper case, and paragraphs up to beyond 256 tokens."""
    paragraphs = [" ".join(_SENTENCES[i : i + n]) for i, n in ((0, 3), (6, 4), (17, 3), (0, 8), (4, 12), (0, 20))]
    shouted = [sentence.upper() for sentence in _SENTENCES[:8]]
    repeated = [" ".join([word] * n) for word, n in (("river", 30), ("Fluss", 90), ("川", 300))]
    pairs = [f"{_SENTENCES[i]} {_SENTENCES[i + 1]}" for i in (1, 9, 18)]
    return [*_SHORT, *_SENTENCES, *paragraphs, *shouted, *repeated, *pairs]
