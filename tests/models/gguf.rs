//! The examples' GGUF reader: reads and dequantises files, and reports the position of an error in a broken one.

use half::f16;
use pikv_engine::llama::gguf::Gguf;
use pikv_engine::llama::quant::Kind;
use pikv_test::gguf_writer::{Writer, string};

fn read(bytes: &[u8]) -> Result<Gguf, String> {
    Gguf::new(Box::new(bytes.to_vec())).map_err(|e| e.to_string())
}

/// Every type of metadata, and three tensors.
fn sample() -> Writer {
    let mut file = Writer::new();
    file.pair("u8", 0, &[200]).pair("i8", 1, &[0xff]).pair("u16", 2, &[1, 2]).pair("i16", 3, &[3, 0]);
    file.whole("u32", 70000).pair("i32", 5, &7i32.to_le_bytes()).real("f32", 0.5).pair("bool", 7, &[1]);
    file.text("text", "naïve").pair("u64", 10, &9u64.to_le_bytes()).pair(
        "big",
        10,
        &(1u64 << 32).to_le_bytes(),
    );
    file.pair("i64", 11, &5i64.to_le_bytes()).pair("f64", 12, &0.1f64.to_le_bytes());
    file.texts("texts", &["a", "", "ïï"]).array("numbers", 5, 2, &[255, 255, 255, 255, 4, 0, 0, 0]);
    file.array("none", 6, 0, &[]);
    file.f32s("w", &[3, 2], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
    file.tensor("h", &[2], 1, vec![0x00, 0x3c, 0x00, 0xc0]);
    file.tensor("q", &[32, 2], 8, (0..68).map(|i| if i % 34 == 1 { 0x3c } else { 0 }).collect());
    file
}

#[test]
fn reads_what_was_written() {
    for (version, alignment) in [(2, 32), (3, 32), (3, 8), (3, 256)] {
        let mut file = sample();
        (file.version, file.alignment) = (version, alignment);
        file.whole("general.alignment", alignment as u32);
        let gguf = read(&file.bytes()).unwrap();
        let whole = ["u8", "u16", "i16", "u32", "i32", "u64", "i64"].map(|name| gguf.whole(name).unwrap());
        assert_eq!(whole, [200, 513, 3, 70000, 7, 9, 5]);
        assert_eq!(["f32", "f64"].map(|name| gguf.real(name).unwrap()), [0.5, 0.1]);
        assert!(gguf.bool("bool").unwrap() && gguf.has("none") && !gguf.has("nothing"));
        assert_eq!(gguf.string("text").unwrap(), "naïve");
        assert_eq!(gguf.strings("texts").unwrap(), ["a", "", "ïï"]);
        assert_eq!(gguf.integers("numbers").unwrap(), [-1, 4]);
        assert_eq!(gguf.tensors().collect::<Vec<_>>(), ["h", "q", "w"]);
        assert_eq!(gguf.dims("w"), Some(&[3, 2][..]));
        assert_eq!(gguf.tensor("w", &[3, 2]).unwrap(), [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
        assert_eq!(gguf.tensor("h", &[2]).unwrap(), [1.0, -2.0]);
        assert_eq!(gguf.tensor("q", &[32, 2]).unwrap(), [0.0; 64]);
        for (result, says) in [
            (gguf.whole("i8").map(drop), "i8: must be a whole number below 2^32"),
            (gguf.whole("big").map(drop), "big: must be"),
            (gguf.whole("nothing").map(drop), "nothing: not in the file's metadata"),
            (gguf.real("u8").map(drop), "u8: must be a floating-point number"),
            (gguf.bool("u8").map(drop), "u8: must be a bool"),
            (gguf.string("u8").map(drop), "u8: must be a string"),
            (gguf.strings("numbers").map(drop), "numbers: must be an array of strings"),
            (gguf.integers("texts").map(drop), "texts: must be an array of 32-bit integers"),
            (gguf.tensor("v", &[2]).map(drop), "\"v\": not in the file"),
            (gguf.tensor("w", &[2, 3]).map(drop), "\"w\": dimensions [3, 2], must be [2, 3]"),
        ] {
            let error = result.unwrap_err().to_string();
            assert!(error.contains(says), "{error}");
        }
    }
}

#[test]
fn a_file_cut_anywhere_is_an_error() {
    let bytes = sample().bytes();
    for len in 0..bytes.len() {
        assert!(read(&bytes[..len]).is_err(), "{len} of {} bytes", bytes.len());
    }
}

#[test]
fn a_wrong_byte_anywhere_does_no_harm() {
    let bytes = sample().bytes();
    for at in 0..bytes.len() {
        for change in [0x01, 0x80, 0xff] {
            let mut bytes = bytes.clone();
            bytes[at] ^= change;
            let Ok(gguf) = read(&bytes) else { continue };
            for name in gguf.tensors() {
                let values = gguf.tensor(name, gguf.dims(name).unwrap()).unwrap();
                assert!(values.len() <= bytes.len());
            }
        }
    }
}

#[test]
fn broken_files_are_refused_by_name() {
    let refused = |bytes: &[u8], says: &str| {
        let error = read(bytes).err().unwrap_or_else(|| panic!("read, and should have said {says:?}"));
        assert!(error.contains(says), "{error:?} does not say {says:?}");
    };
    let patched = |at: usize, with: &[u8]| {
        let mut bytes = sample().bytes();
        bytes[at..at + with.len()].copy_from_slice(with);
        bytes
    };
    let changed = |change: &dyn Fn(&mut Writer)| {
        let mut file = sample();
        change(&mut file);
        file.bytes()
    };
    let huge = u64::MAX.to_le_bytes();

    refused(&[], "byte 0: magic: 4 bytes, the file has 0 more");
    refused(&patched(0, b"GGML"), "byte 0: begins with");
    refused(&patched(4, &[1]), "version 1; versions 2 and 3 are read");
    refused(&patched(4, &[0, 0, 0, 3]), "big-endian");
    refused(&patched(4, &[9]), "version 9");
    refused(&patched(8, &huge), "byte 8: number of tensors: 18446744073709551615");
    refused(&patched(16, &huge), "byte 16: number of metadata pairs: 18446744073709551615");
    refused(&patched(24, &huge), "byte 24: name of metadata pair 0: 18446744073709551615");
    refused(
        &changed(&|f| {
            f.pair("x", 13, &[0; 8]);
        }),
        "x: type 13, the format has 0 to 12",
    );
    refused(
        &changed(&|f| {
            f.pair("x", 7, &[2]);
        }),
        "x: 2, a bool is 0 or 1",
    );
    refused(
        &changed(&|f| {
            f.pair("x", 8, &[1, 0, 0, 0, 0, 0, 0, 0, 0xff]);
        }),
        "x: invalid utf-8",
    );
    refused(
        &changed(&|f| {
            f.array("x", 9, 1, &[0; 20]);
        }),
        "x: arrays of arrays",
    );
    refused(
        &changed(&|f| {
            f.array("x", 4, usize::MAX / 2, &[]);
        }),
        "x: 9223372036854775807",
    );
    refused(
        &changed(&|f| {
            f.array("x", 8, 1, &huge);
        }),
        "x: 18446744073709551615",
    );
    refused(
        &changed(&|f| {
            f.whole("general.alignment", 0);
        }),
        "general.alignment: no power of two",
    );
    refused(
        &changed(&|f| {
            f.whole("general.alignment", 24);
        }),
        "general.alignment: no power of two",
    );
    refused(&changed(&|f| f.tensors[0].1 = vec![]), "tensor \"w\": 0 dimensions, must be 1 to 4");
    refused(&changed(&|f| f.tensors[0].1 = vec![1; 5]), "tensor \"w\": 5 dimensions");
    refused(&changed(&|f| f.tensors[0].1 = vec![3, 0]), "tensor \"w\": dimensions [3, 0]");
    refused(&changed(&|f| f.tensors[0].1 = vec![1 << 40; 2]), "tensor \"w\": dimensions");
    refused(&changed(&|f| f.tensors[0].1 = vec![1 << 62, 1]), "tensor \"w\": dimensions");
    refused(
        &changed(&|f| f.tensors[0].1 = vec![3, 1 << 40]),
        "tensor \"w\": 13194139533312 bytes at offset 0",
    );
    refused(
        &changed(&|f| f.tensors[2].1 = vec![33]),
        "tensor \"q\": dimensions [33] of Q8_0, which comes in blocks of 32",
    );
    refused(
        &changed(&|f| f.tensors[2].2 = 10),
        "tensor \"q\": form 10 is not read; 0 (F32), 1 (F16), 30 (BF16)",
    );
    refused(&changed(&|f| f.tensors[1].0 = "w".into()), "tensor \"w\": twice");
    refused(&changed(&|f| f.alignment = 8), "aligned to 32");
    let mut twice = sample().bytes();
    let from = twice.windows(3).position(|w| w == b"i16").unwrap();
    twice[from..from + 3].copy_from_slice(b"f32");
    refused(&twice, "metadata \"f32\" twice");
    let last = sample().bytes().len() - 1;
    refused(
        &sample().bytes()[..last],
        "tensor \"q\": 68 bytes at offset 64 of the data, which has 131 bytes",
    );
    assert_eq!(string("ab"), [2, 0, 0, 0, 0, 0, 0, 0, b'a', b'b']);
}

/// Form, number in the format, bytes of a block, positions of its f16 scales; then the results of another implementation, the Python
/// package `gguf`, for [`pattern`]: the second value, the last, and a weighted sum of all.
type Known = (Kind, u32, usize, &'static [usize], f64, f64, f64);
const KNOWN: [Known; 11] = [
    (Kind::F32, 0, 4, &[], 1.8263128995895386, 0.22387735545635223, 13.219846714287996),
    (Kind::F16, 1, 2, &[], 1.5830078125, 1.0185546875, 67.21875),
    (Kind::BF16, 30, 2, &[], 0.2080078125, 0.00897216796875, 28.09088134765625),
    (Kind::Q4_0, 2, 18, &[0], 0.5, -1.75, 37.5),
    (Kind::Q4_1, 3, 20, &[0, 2], 0.625, 2.375, 732.875),
    (Kind::Q5_0, 6, 22, &[0], -0.25, 1.0, -67.5),
    (Kind::Q5_1, 7, 24, &[0, 2], 5.875, 6.875, 1603.625),
    (Kind::Q8_0, 8, 34, &[0], 30.5, -15.25, 118.5),
    (Kind::Q4_K, 12, 144, &[0, 2], 35.0, 162.375, 266149.75),
    (Kind::Q5_K, 13, 176, &[0, 2], 73.75, 128.25, 438247.125),
    (Kind::Q6_K, 14, 210, &[208], 0.0, 497.25, -71962.5),
];

/// Two blocks (or eight single weights) of bytes in a pattern, with scales that leave all sums exact.
fn pattern(size: usize, scales: &[usize]) -> Vec<u8> {
    let blocks = if size > 16 { 2 } else { 8 };
    let mut bytes: Vec<u8> = (0..size * blocks).map(|i| (i * 37 + i / 7 + 11) as u8).collect();
    for block in bytes.chunks_exact_mut(size) {
        for (at, scale) in scales.iter().zip([0.25, -0.375]) {
            block[*at..at + 2].copy_from_slice(&f16::from_f32(scale).to_le_bytes());
        }
        if scales.is_empty() {
            block[size - 1] = 0x3c + (block[size - 1] & 3); // Keeps exponents near 0.
        }
    }
    bytes
}

#[test]
fn dequantises_as_another_implementation() {
    for (kind, number, size, scales, second, last, sum) in KNOWN {
        assert_eq!((Kind::new(number).unwrap(), kind.block().1), (kind, size));
        let values: Vec<f64> = kind.to_f32(&pattern(size, scales)).into_iter().map(f64::from).collect();
        let weighted: f64 = values.iter().enumerate().map(|(i, x)| x * ((i * i + 1) % 17) as f64).sum();
        assert_eq!((values[1], values[values.len() - 1], weighted), (second, last, sum), "{kind:?}");
    }
}

/// Weight `n` of a block by the format's description, one bit at a time.
fn slow(kind: Kind, block: &[u8], n: usize) -> f64 {
    let f16_at = |at: usize| f16::from_le_bytes([block[at], block[at + 1]]).to_f64();
    // `count` bits from bit `bit` of byte `at`.
    let bits = |at: usize, bit: usize, count: usize| -> f64 {
        (0..count).map(|i| f64::from(u8::from(block[at] & (1 << (bit + i)) != 0)) * 2f64.powi(i as i32)).sum()
    };
    // Forms of 32: a byte for weights n and n + 16.
    let four = |at: usize| bits(at + n % 16, n / 16 * 4, 4);
    let fifth = |at: usize| bits(at + n / 8, n % 8, 1) * 16.0;
    let signed = |at: usize| f64::from(i8::from_le_bytes([block[at]]));
    let k_scale = |sub: usize, minimum: usize| match sub {
        0..4 => bits(4 + 4 * minimum + sub, 0, 6),
        _ => bits(8 + sub, 4 * minimum, 4) + 16.0 * bits(sub + 4 * minimum, 6, 2),
    };
    let sub = n / 32;
    let k = |q: f64| f16_at(0) * k_scale(sub, 0) * q - f16_at(2) * k_scale(sub, 1);
    let k_four = |at: usize| bits(at + n / 64 * 32 + n % 32, sub % 2 * 4, 4);
    match kind {
        Kind::F32 => f32::from_le_bytes([block[0], block[1], block[2], block[3]]).into(),
        Kind::F16 => f16_at(0),
        Kind::BF16 => f32::from_le_bytes([0, 0, block[0], block[1]]).into(),
        Kind::Q4_0 => f16_at(0) * (four(2) - 8.0),
        Kind::Q4_1 => f16_at(0) * four(4) + f16_at(2),
        Kind::Q5_0 => f16_at(0) * (four(6) + fifth(2) - 16.0),
        Kind::Q5_1 => f16_at(0) * (four(8) + fifth(4)) + f16_at(2),
        Kind::Q8_0 => f16_at(0) * signed(2 + n),
        Kind::Q4_K => k(k_four(16)),
        Kind::Q5_K => k(k_four(48) + 16.0 * bits(16 + n % 32, sub, 1)),
        Kind::Q6_K => {
            let (half, quarter) = (n / 128, n / 32 % 4);
            let low = bits(half * 64 + n % 64, if quarter < 2 { 0 } else { 4 }, 4);
            let high = bits(128 + half * 32 + n % 32, 2 * quarter, 2);
            f16_at(208) * signed(192 + n / 16) * (low + 16.0 * high - 32.0)
        }
    }
}

#[test]
fn dequantises_as_the_format_says() {
    for (kind, _, size, scales, ..) in KNOWN {
        let mut bytes = pattern(size, scales);
        for (i, block) in bytes.chunks_exact_mut(size).enumerate() {
            for at in scales {
                block[*at..at + 2].copy_from_slice(&f16::from_f32(0.013 + i as f32 * 0.7).to_le_bytes());
            }
        }
        let values = kind.to_f32(&bytes);
        let most = values.iter().fold(0.0, |most, x| x.abs().max(most));
        for (i, x) in values.into_iter().enumerate() {
            let (block, n) = (i / kind.block().0, i % kind.block().0);
            let right = slow(kind, &bytes[block * size..][..size], n);
            // Three roundings, the largest of values that a minimum is taken from.
            assert!(
                (f64::from(x) - right).abs() <= 4e-7 * f64::from(most),
                "{kind:?} {block} {n}: {x}, {right}"
            );
        }
    }
}
