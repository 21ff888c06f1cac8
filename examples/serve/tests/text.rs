//! Text and tokens without a server.

use pikv_engine::common::sample::Sampler;
use pikv_serve::text::Text;

/// The pieces that come of the bytes of `text`, given `n` at a time.
fn pieces(text: &[u8], n: usize, stops: &[&str]) -> (Vec<String>, bool) {
    let mut out = Text::new(stops.iter().map(|stop| stop.to_string()).collect());
    let mut pieces: Vec<String> = Vec::new();
    for bytes in text.chunks(n) {
        if !out.stopped {
            pieces.push(out.push(bytes));
        }
    }
    pieces.push(out.finish());
    (pieces, out.stopped)
}

#[test]
fn text_is_the_same_however_its_bytes_come() {
    let broken: &[u8] = b"a\xf0\x9f\x98z\xffb\xe2\x82";
    for text in ["plain".as_bytes(), "naïve – 😀!".as_bytes(), broken, b""] {
        for n in 1..6 {
            let (pieces, stopped) = pieces(text, n, &["never"]);
            assert_eq!(
                (pieces.concat(), stopped),
                (String::from_utf8_lossy(text).into_owned(), false),
                "{n} bytes"
            );
        }
    }
}

#[test]
fn nothing_of_a_stop_string_is_given() {
    for (text, stops, expected) in [
        ("one two three", &["two"][..], Some("one ")),
        ("aaab", &["aab"], Some("a")),
        ("a\n\nb", &["\n\n", "b"], Some("a")),
        ("abcx", &["abcd"], None),
        ("ab", &["abc"], None),
        ("größer", &["ß"], Some("grö")),
        // The one that comes first, not the one that is named first.
        ("xyz", &["z", "y"], Some("x")),
    ] {
        for n in 1..5 {
            let (pieces, stopped) = pieces(text.as_bytes(), n, stops);
            assert_eq!(
                (pieces.concat().as_str(), stopped),
                (expected.unwrap_or(text), expected.is_some()),
                "{text}"
            );
        }
    }
    // What cannot be the beginning of a stop string does not wait.
    assert_eq!(pieces(b"abcab", 1, &["abd"]).0, ["", "", "abc", "", "", "ab"]);
}

#[test]
fn samplers_repeat_themselves_and_keep_to_the_likely() {
    let logits = [0.0, 2.0, 1.9, -3.0, 2.0];
    assert_eq!(Sampler::new(0.0, 1.0, 7).choose(&logits), 1);
    let draw = |temperature, top_p, seed| -> Vec<u32> {
        let mut sampler = Sampler::new(temperature, top_p, seed);
        (0..200).map(|_| sampler.choose(&logits)).collect()
    };
    assert_eq!(draw(1.0, 1.0, 3), draw(1.0, 1.0, 3));
    assert_ne!(draw(1.0, 1.0, 3), draw(1.0, 1.0, 4));
    // 1 and 4 have 0.67 of the probability, the third most likely is 2.
    assert!(draw(1.0, 0.6, 3).iter().all(|token| [1, 4].contains(token)));
    assert!(draw(1.0, 0.8, 3).contains(&2) && !draw(1.0, 0.8, 3).contains(&0));
    assert!(draw(1.0, 0.0, 3).iter().all(|token| *token == 1));
    assert!(draw(2.0, 1.0, 3).contains(&3));
}
