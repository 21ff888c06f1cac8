//! The file of fitted maps: written, read, damaged.

use super::fitter::{SHAPE, filled};
use super::*;
use proptest::prelude::*;
use std::sync::LazyLock;

fn fitted() -> Fitted {
    let fitter = filled(4, 20);
    let k = fitter.side("C_Lo+", |l, h| fit_lora_plus(fitter.k(l, h)?, 2 + h).map(|f| f.map)).unwrap();
    let v = fitter.side("C_SVD", |l, h| svd(fitter.v(l, h)?, 3).map(|f| f.map)).unwrap();
    Fitted::new(SHAPE, "a model", Some(k), Some(v)).unwrap()
}

static FILE: LazyLock<Vec<u8>> = LazyLock::new(|| fitted().to_bytes().unwrap());

#[test]
fn what_is_read_is_what_was_written_to_the_bit() {
    let dir = std::env::temp_dir().join(format!("pikv-fitted-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    let path = dir.join("maps.safetensors");
    let fitter = filled(4, 20);
    let crops = fitter
        .side("C_Pr", |l, h| {
            think(&fitter.q(l, h)?.mean_squares(), &fitter.k(l, h)?.mean_squares(), None, 4).map(|c| c.map)
        })
        .unwrap();
    let turned = FittedSide::new("Hadamard", vec![Map::hadamard(6).unwrap(); 4]);
    let (k, v) = (fitted().k().cloned(), fitted().v().cloned());
    for fitted in [
        fitted(),
        Fitted::new(SHAPE, "m", Some(crops), None).unwrap(),
        Fitted::new(SHAPE, "", Some(turned), v.clone()).unwrap(),
        Fitted::new(SHAPE, "m", None, v).unwrap(),
        Fitted::new(SHAPE, "m", k, None).unwrap(),
    ] {
        fitted.save(&path).unwrap();
        let read = Fitted::load(&path, fitted.fingerprint(), SHAPE).unwrap();
        assert_eq!(read, fitted);
        for (a, b) in [(read.k(), fitted.k()), (read.v(), fitted.v())] {
            let maps = |s: Option<&FittedSide>| s.map_or(vec![], |s| s.maps.clone());
            let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            for (a, b) in maps(a).iter().zip(&maps(b)) {
                assert_eq!((bits(&a.encode()), bits(&a.decode())), (bits(&b.encode()), bits(&b.decode())));
                assert_eq!(a.bias().map(bits), b.bias().map(bits));
            }
        }
        assert_eq!(std::fs::read_dir(&dir).unwrap().count(), 1, "nothing but the file is left");
    }
    // A missing folder, and a name that is a folder: an error, and no files left.
    assert!(matches!(fitted().save(&dir.join("no/such/file")), Err(FittedError::Io { .. })));
    std::fs::create_dir(dir.join("folder")).unwrap();
    assert!(matches!(fitted().save(&dir.join("folder")), Err(FittedError::Io { .. })));
    assert!(matches!(Fitted::load(&dir.join("none"), "m", SHAPE), Err(FittedError::Io { .. })));
    assert_eq!(std::fs::read_dir(&dir).unwrap().count(), 2);
    std::fs::remove_dir_all(&dir).unwrap();
}

#[test]
fn a_file_for_something_else_is_refused() {
    let read = |model: &str, shape| Fitted::from_bytes(&FILE, model, shape).unwrap_err();
    assert!(matches!(read("another", SHAPE), FittedError::Fingerprint { .. }));
    let missing = read("a model", FitShape::new(3, 2, 4, 6).v_dim(5));
    assert!(
        matches!(&missing, FittedError::Missing { name } if name == "layers.2.heads.0.k.encode"),
        "{missing}"
    );
    let left = read("a model", FitShape::new(1, 2, 4, 6).v_dim(5));
    assert!(matches!(left, FittedError::Unexpected { .. } | FittedError::Metadata { .. }), "{left}");
    assert!(matches!(
        read("a model", FitShape::new(2, 1, 4, 6).v_dim(5)),
        FittedError::Unexpected { .. } | FittedError::Metadata { .. }
    ));
    let said = read("a model", FitShape::new(2, 2, 4, 7).v_dim(5)).to_string();
    assert_eq!(said, "tensor \"layers.0.heads.0.k.encode\" is F32 [2, 6]; F32 [1..=7, 7] is needed");
    assert!(matches!(read("a model", SHAPE.v_dim(4)), FittedError::Tensor { .. }));

    let side = |n: usize, wide| Some(FittedSide::new("C_SVD", vec![Map::hadamard(wide).unwrap(); n]));
    let new = |k, v| Fitted::new(SHAPE, "m", k, v).unwrap_err();
    assert!(matches!(new(None, None), FittedError::Empty));
    assert_eq!(new(side(3, 6), None).to_string(), "3 maps for k; 2 layers of 2 KV heads need 4");
    assert!(matches!(new(None, side(4, 6)), FittedError::Width { wide: 6, wanted: 5, .. }));
}

/// The file with one piece of its header's text exchanged for another of any length.
fn edited(from: &str, to: &str) -> Vec<u8> {
    let n = u64::from_le_bytes(FILE[..8].try_into().unwrap()) as usize;
    let header = std::str::from_utf8(&FILE[8..8 + n]).unwrap();
    assert!(header.contains(from), "{header}");
    let header = header.replace(from, to);
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.extend(&FILE[8 + n..]);
    bytes
}

#[test]
fn a_header_that_says_something_else_is_refused() {
    let read = |from, to| Fitted::from_bytes(&edited(from, to), "a model", SHAPE).unwrap_err();
    assert!(Fitted::from_bytes(&edited("a model", "a model"), "a model", SHAPE).is_ok());
    let version = read("\"version\":\"1\"", "\"version\":\"2\"").to_string();
    assert_eq!(version, "metadata \"version\" is Some(\"2\"); \"1\" is needed");
    assert!(matches!(read("pikv fitted maps", "some maps"), FittedError::Metadata { .. }));
    assert!(matches!(read("\"fingerprint\"", "\"finger\""), FittedError::Metadata { found: None, .. }));
    assert!(matches!(read("C_Lo+", "C_SVD"), FittedError::Digest { .. }));
    assert!(matches!(read("\"k.ranks\":\"2,3", "\"k.ranks\":\"3,2"), FittedError::Digest { .. }));
    assert!(matches!(read("\"shape\":[6,2]", "\"shape\":[2,6]"), FittedError::Digest { .. }));
    assert!(matches!(read("\"digest\"", "\"digits\""), FittedError::Metadata { .. }));
    assert!(matches!(read("\"F32\"", "\"I32\""), FittedError::Digest { .. }));
}

proptest! {
    #[test]
    fn damaged_files_are_refused(at in any::<prop::sample::Index>(), bit in 0u8..8, cut in any::<bool>()) {
        let mut bytes = FILE.clone();
        let at = at.index(bytes.len());
        if cut { bytes.truncate(at) } else { bytes[at] ^= 1 << bit }
        let read = Fitted::from_bytes(&bytes, "a model", SHAPE);
        // A change that JSON does not see, as of one blank to another, may pass, with every bit as it was.
        prop_assert!(read.is_err() || read.unwrap() == fitted());
    }

    #[test]
    fn damaged_headers_are_refused(at in any::<prop::sample::Index>(), byte in any::<u8>()) {
        let mut bytes = FILE.clone();
        let header = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        bytes[at.index(header)] = byte;
        let read = Fitted::from_bytes(&bytes, "a model", SHAPE);
        prop_assert!(read.is_err() || read.unwrap() == fitted());
    }

    #[test]
    fn noise_is_no_file(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
        prop_assert!(Fitted::from_bytes(&bytes, "a model", SHAPE).is_err());
    }
}

#[test]
fn fingerprints_tell_parts_apart() {
    let a = fingerprint(&[("a", b"bc"), ("d", b"")]);
    assert_eq!(a.len(), 64);
    for other in [
        &[("ab", &b"c"[..]), ("d", b"")][..],
        &[("a", b"bcd")],
        &[("d", b""), ("a", b"bc")],
        &[("a", b"bc")],
        &[],
    ] {
        assert_ne!(a, fingerprint(other));
    }
    // Stable: files outlive versions. BLAKE3 of nothing.
    assert_eq!(fingerprint(&[]), "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262");
}
