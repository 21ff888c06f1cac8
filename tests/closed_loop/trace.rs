//! Traces: written, read, refused, generated.

use pikv::trace::{Reader, Row, Skewed, TraceError, Writer};
use proptest::prelude::*;

fn write(experts: u32, rows: &[Row]) -> Result<String, TraceError> {
    let mut writer = Writer::new(Vec::new(), experts)?;
    rows.iter().try_for_each(|row| writer.write(row))?;
    Ok(String::from_utf8(writer.finish()?).unwrap())
}

fn read(text: &str) -> Result<Vec<Row>, TraceError> {
    Reader::new(text.as_bytes())?.collect()
}

#[test]
fn the_form_of_the_file() {
    let rows = [
        Row::new(17, vec![3, 5], vec![]),
        Row::new(u32::MAX, vec![0], vec![0]),
        Row::new(0, vec![15, 0, 1], vec![1, 0]),
    ];
    let text = write(16, &rows).unwrap();
    assert_eq!(text, "token,experts of 16,wanted\n17,3 5,\n4294967295,0,0\n0,15 0 1,1 0\n");
    assert_eq!(Reader::new(text.as_bytes()).unwrap().experts(), 16);
    assert_eq!(read(&text).unwrap(), rows);
    // Ends of lines as other systems write them.
    assert_eq!(read(&text.replace('\n', "\r\n")).unwrap(), rows);
    assert_eq!(read("token,experts of 1,wanted\n").unwrap(), []);
}

#[test]
fn what_is_no_trace() {
    for header in
        ["", "token,experts,wanted", "token,experts of 0,wanted", "token,experts of 65536,wanted", "x"]
    {
        let error = read(&format!("{header}\n1,0,\n")).unwrap_err();
        assert!(matches!(&error, TraceError::Header { found } if found == header), "{error}");
    }
    for (row, message) in [
        ("", "line 3: the row \"\"; it must be token,experts,wanted"),
        ("1,0", "line 3: the row \"1,0\"; it must be token,experts,wanted"),
        ("1,0,,", "line 3: the row \"1,0,,\"; it must be token,experts,wanted"),
        ("-1,0,", "line 3: token \"-1\"; it must be a number below 2^32"),
        ("1,a,", "line 3: experts \"a\"; it must be numbers separated by blanks"),
        ("1,70000,", "line 3: experts \"70000\"; it must be numbers separated by blanks"),
        ("1,,", "line 3: experts \"\"; it must be at least 1, each below 4, none twice"),
        ("1,4,", "line 3: experts \"4\"; it must be at least 1, each below 4, none twice"),
        ("1,2 0 2,", "line 3: experts \"2 0 2\"; it must be at least 1, each below 4, none twice"),
        ("1,0,x", "line 3: wanted \"x\"; it must be numbers separated by blanks"),
        ("1,0,0 1", "line 3: wanted \"1\"; it must be positions before the token's own, 1"),
    ] {
        let text = format!("token,experts of 4,wanted\n9,3,\n{row}\n");
        assert_eq!(read(&text).unwrap_err().to_string(), message);
    }
    // An invalid row is not written, and the file continues without it.
    let mut writer = Writer::new(Vec::new(), 4).unwrap();
    assert!(writer.write(&Row::new(0, vec![4], vec![])).is_err());
    assert!(writer.write(&Row::new(0, vec![3], vec![0])).is_err());
    writer.write(&Row::new(7, vec![3], vec![])).unwrap();
    assert_eq!(read(std::str::from_utf8(&writer.finish().unwrap()).unwrap()).unwrap().len(), 1);
    assert!(matches!(Writer::new(Vec::new(), 0), Err(TraceError::Header { .. })));
    assert!(matches!(Writer::new(Vec::new(), 65536), Err(TraceError::Header { .. })));
}

proptest! {
    #![proptest_config(pikv_test::cases(64, 64))]

    /// Generated traces are valid, repeatable, and unchanged after writing and reading.
    #[test]
    fn there_and_back(experts in 1u32..40, share in 0.0f64..1.0, skew in 0.0f64..3.0, drift in 0u32..20, wants in 0u32..9, seed: u64) {
        let top_k = 1 + (f64::from(experts - 1) * share) as u32;
        let options = Skewed::default().experts(experts).top_k(top_k).skew(skew).drift(drift).wants(wants).vocabulary(100).seed(seed);
        let rows: Vec<Row> = options.rows().unwrap().take(200).collect();
        prop_assert!(options.rows().unwrap().take(200).eq(rows.iter().cloned()));
        for (position, row) in rows.iter().enumerate() {
            prop_assert_eq!(row.experts.len(), top_k as usize);
            prop_assert!(row.token < 100);
            prop_assert!(row.wanted.len() <= wants as usize && (position == 0 || wants == 0 || !row.wanted.is_empty()));
        }
        prop_assert_eq!(read(&write(experts, &rows).unwrap()).unwrap(), rows);
    }

    /// Any bytes are read or refused, without a panic.
    #[test]
    fn noise_is_refused(text in "(token,experts of [0-9]{1,6},wanted\n)?([0-9, \n]|\\PC){0,60}") {
        let _ = read(&text);
    }
}

/// First choices occur with their ranks' weights: by Pearson's measure, whose 0.1 % point is 37.7 for 15 degrees of freedom.
#[test]
fn ranks_are_drawn_by_weight() {
    for skew in [0.0, 1.0, 1.7] {
        let options = Skewed::default().skew(skew).drift(0).seed(3);
        let mut counts = [0u32; 16];
        let n = 20_000;
        options.rows().unwrap().take(n).for_each(|row| counts[usize::from(row.experts[0])] += 1);
        let weights = (1..=16).map(|r| f64::from(r).powf(-skew)).collect::<Vec<_>>();
        let sum: f64 = weights.iter().sum();
        let off = |(count, weight): (&u32, &f64)| {
            let expected = n as f64 * weight / sum;
            (f64::from(*count) - expected).powi(2) / expected
        };
        let measure: f64 = counts.iter().zip(&weights).map(off).sum();
        assert!(measure < 37.7, "skew {skew}: {measure} of {counts:?}");
    }
}

/// Half of the looks back are nearer than the root of the length: distances have weight 1/d.
#[test]
fn queries_look_back_by_logarithm() {
    let options = Skewed::default().wants(1).seed(5);
    let (mut near, mut all) = (0, 0);
    for (position, row) in options.rows().unwrap().take(20_000).enumerate().skip(1) {
        let back = position - row.wanted[0] as usize;
        near += usize::from((back as f64) < (position as f64).sqrt());
        all += 1;
    }
    let share = f64::from(near as u32) / f64::from(all);
    assert!((share - 0.5).abs() < 0.02, "{share}");
}

#[test]
fn the_hot_set_drifts() {
    let hottest = |drift: u32| {
        let mut rows = Skewed::default().drift(drift).rows().unwrap();
        let mut seen = vec![false; 16];
        for _ in 0..2000 {
            let rank = rows.by_rank().to_vec();
            seen[usize::from(rank[0])] = true;
            rows.next();
        }
        seen.into_iter().filter(|seen| *seen).count()
    };
    assert_eq!(hottest(0), 1);
    assert!(hottest(20) > 8, "{}", hottest(20));
}

#[test]
fn streams_that_cannot_be() {
    let fine = Skewed::default();
    let refused = |options: Skewed| match options.rows().unwrap_err() {
        TraceError::Value { name, .. } => name,
        other => panic!("{other}"),
    };
    assert_eq!(refused(fine.experts(0)), "experts");
    assert_eq!(refused(fine.experts(65536)), "experts");
    assert_eq!(refused(fine.top_k(0)), "top_k");
    assert_eq!(refused(fine.top_k(17)), "top_k");
    for skew in [-0.1, 16.1, f64::NAN, f64::INFINITY] {
        assert_eq!(refused(fine.skew(skew)), "skew");
    }
    assert_eq!(refused(fine.vocabulary(0)), "vocabulary");
}
