//! Projectors from an adapter in PEFT's layout, written by the test.

use super::*;
use half::{bf16, f16};
use pikv::codec::{FitShape, PeftConfig, PeftUse};
use safetensors::{Dtype, tensor::TensorView};

const SHAPE: FitShape = FitShape::new(2, 2, 4, 6).v_dim(4);
const HIDDEN: usize = 10;
const RANK: usize = 3;

#[derive(Clone)]
struct Tensor {
    name: String,
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

fn tensor(name: String, dtype: Dtype, shape: [usize; 2], values: &[f32]) -> Tensor {
    let bytes = match dtype {
        Dtype::F16 => values.iter().flat_map(|x| f16::from_f32(*x).to_le_bytes()).collect(),
        Dtype::BF16 => values.iter().flat_map(|x| bf16::from_f32(*x).to_le_bytes()).collect(),
        Dtype::F32 => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
        _ => values.iter().flat_map(|x| f64::from(*x).to_le_bytes()).collect(),
    };
    Tensor { name, dtype, shape: shape.to_vec(), bytes }
}

fn file(tensors: &[Tensor]) -> Vec<u8> {
    let views = tensors
        .iter()
        .map(|t| (t.name.as_str(), TensorView::new(t.dtype, t.shape.clone(), &t.bytes).unwrap()));
    safetensors::serialize(views, None).unwrap()
}

fn name(layer: u32, module: &str, matrix: &str) -> String {
    format!("base_model.model.model.layers.{layer}.self_attn.{module}.lora_{matrix}.weight")
}

/// Values of a matrix that all dtypes hold exactly.
fn matrix(seed: u64, n: usize) -> Vec<f32> {
    noise(seed, n).iter().map(|x| (x * 64.0).round() / 64.0).collect()
}

/// An adapter of q_proj, k_proj and v_proj whose A reads `width` channels; `None`: the module's own inputs.
fn adapter(dtype: Dtype, width: Option<usize>) -> Vec<Tensor> {
    let mut all = Vec::new();
    for layer in 0..SHAPE.layers {
        for (m, (module, out)) in [("q_proj", 24), ("k_proj", 12), ("v_proj", 8)].into_iter().enumerate() {
            let (seed, width) = (u64::from(layer) * 16 + m as u64 * 2, width.unwrap_or(out));
            all.push(tensor(name(layer, module, "A"), dtype, [RANK, width], &matrix(seed, RANK * width)));
            all.push(tensor(name(layer, module, "B"), dtype, [out, RANK], &matrix(seed + 1, out * RANK)));
        }
    }
    all
}

const CONFIG: PeftConfig = PeftConfig::new(3, 6.0);

fn load(tensors: &[Tensor], how: PeftUse) -> Result<Fitted, FittedError> {
    Fitted::from_peft(&file(tensors), CONFIG, how, SHAPE, "a model")
}

#[test]
fn the_span_of_each_heads_rows_is_kept_and_no_more() {
    for dtype in [Dtype::F32, Dtype::F16, Dtype::BF16] {
        let fitted = load(&adapter(dtype, Some(HIDDEN)), PeftUse::Span).unwrap();
        for (side, dim, m) in [(fitted.k(), 6usize, 1u64), (fitted.v(), 4, 2)] {
            let side = side.unwrap();
            assert_eq!((side.method.as_str(), side.maps.len()), ("C_Lo", 4));
            for (at, map) in side.maps.iter().enumerate() {
                let (layer, head) = (at as u64 / 2, at % 2);
                let b = matrix(layer * 16 + m * 2 + 1, 2 * dim * RANK);
                let b = &b[head * dim * RANK..][..dim * RANK];
                assert_eq!((map.wide() as usize, map.narrow() as usize), (dim, RANK));
                let through = |x: &[f32]| {
                    let (mut stored, mut back) = (vec![0.0; RANK], vec![0.0; dim]);
                    map.encode_row(x, &mut stored);
                    map.decode_row(&stored, &mut back);
                    back
                };
                // The head's update is restored for any A.
                for seed in 0..5 {
                    let low = matrix(900 + seed, RANK);
                    let x: Vec<f32> =
                        (0..dim).map(|c| (0..RANK).map(|r| b[c * RANK + r] * low[r]).sum()).collect();
                    assert!(through(&x).iter().zip(&x).all(|(a, b)| (a - b).abs() < 1e-4), "{dtype:?} {at}");
                }
                // The error of any other row is orthogonal to the columns of B.
                let x = matrix(77, dim);
                let lost: Vec<f32> = x.iter().zip(through(&x)).map(|(x, y)| x - y).collect();
                assert!(lost.iter().any(|x| x.abs() > 1e-3));
                for r in 0..RANK {
                    let dot: f32 = (0..dim).map(|c| lost[c] * b[c * RANK + r]).sum();
                    assert!(dot.abs() < 1e-4, "{dot}");
                }
            }
        }
        // It is a file of fitted maps as any other.
        assert_eq!(Fitted::from_bytes(&fitted.to_bytes().unwrap(), "a model", SHAPE).unwrap(), fitted);
    }
    // Columns that depend on one another are stored once; a rank above the channels is no more than these.
    let mut tensors = adapter(Dtype::F32, Some(HIDDEN));
    let one: Vec<f32> = (0..12).flat_map(|c| [c as f32, 2.0 * c as f32, -(c as f32)]).collect();
    let at = tensors.iter().position(|t| t.name == name(0, "k_proj", "B")).unwrap();
    tensors[at] = tensor(name(0, "k_proj", "B"), Dtype::F32, [12, 3], &one);
    let fitted = load(&tensors, PeftUse::Span).unwrap();
    assert_eq!(fitted.k().unwrap().maps.iter().map(|m| m.narrow()).collect::<Vec<_>>(), [1, 1, 3, 3]);
}

#[test]
fn a_reconstruction_is_a_then_b_with_its_scale() {
    for (config, scale) in [(CONFIG, 2.0), (CONFIG.rslora(true), 6.0 / 3f32.sqrt()), (CONFIG.alpha(3.0), 1.0)]
    {
        let bytes = file(&adapter(Dtype::F32, None));
        let fitted = Fitted::from_peft(&bytes, config, PeftUse::Reconstruction, SHAPE, "m").unwrap();
        for (side, dim, m) in [(fitted.k(), 6usize, 1u64), (fitted.v(), 4, 2)] {
            for (at, map) in side.unwrap().maps.iter().enumerate() {
                let (seed, head) = (at as u64 / 2 * 16 + m * 2, at % 2);
                let (a, b) = (matrix(seed, RANK * 2 * dim), matrix(seed + 1, 2 * dim * RANK));
                let down: Vec<f32> =
                    (0..RANK).flat_map(|r| a[r * 2 * dim + head * dim..][..dim].to_vec()).collect();
                let up: Vec<f32> = b[head * dim * RANK..][..dim * RANK].iter().map(|x| scale * x).collect();
                assert_eq!((&*map.encode(), &*map.decode()), (&down[..], &up[..]));
            }
        }
    }
}

#[test]
fn the_folder_of_an_adapter_is_read() {
    let folder = std::env::temp_dir().join(format!("pikv-peft-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let bytes = file(&adapter(Dtype::BF16, Some(HIDDEN)));
    std::fs::write(folder.join("adapter_model.safetensors"), &bytes).unwrap();
    let missing = Fitted::load_peft(&folder, PeftUse::Span, SHAPE, "m").unwrap_err();
    assert!(missing.to_string().contains("adapter_config.json"), "{missing}");
    let text = r#"{"peft_type": "LORA", "r": 3, "lora_alpha": 6, "target_modules": ["k_proj", "v_proj"],
        "rank_pattern": {}, "alpha_pattern": {}, "use_rslora": false, "use_dora": false, "bias": "none"}"#;
    std::fs::write(folder.join("adapter_config.json"), text).unwrap();
    let read = Fitted::load_peft(&folder, PeftUse::Span, SHAPE, "m").unwrap();
    assert_eq!(read, Fitted::from_peft(&bytes, CONFIG, PeftUse::Span, SHAPE, "m").unwrap());
    std::fs::remove_dir_all(&folder).unwrap();
    assert_eq!(PeftConfig::from_json(text).unwrap(), CONFIG);
    let rs = PeftConfig::from_json(r#"{"r": 8, "lora_alpha": 16, "use_rslora": true}"#).unwrap();
    assert_eq!(rs, PeftConfig::new(8, 16.0).rslora(true));
}

#[test]
fn what_no_projector_can_be_made_of_is_refused() {
    let text = |text: &str| PeftConfig::from_json(text).unwrap_err().to_string();
    for (json, needle) in [
        ("{", "EOF"),
        ("[]", "\"r\" is null"),
        (r#"{"r": 4}"#, "\"lora_alpha\" is null"),
        (r#"{"r": 0, "lora_alpha": 1}"#, "r must be at least 1"),
        (r#"{"r": 2.5, "lora_alpha": 1}"#, "r must be at least 1"),
        (r#"{"r": 4, "lora_alpha": 0}"#, "not 0"),
        (r#"{"r": 4, "lora_alpha": 8, "use_dora": true}"#, "use_dora"),
        (r#"{"r": 4, "lora_alpha": 8, "rank_pattern": {"k_proj": 2}}"#, "rank_pattern"),
        (r#"{"r": 4, "lora_alpha": 8, "alpha_pattern": {"k_proj": 2}}"#, "alpha_pattern"),
    ] {
        assert!(text(json).contains(needle), "{json}: {}", text(json));
    }
    let change = |of: &dyn Fn(&mut Vec<Tensor>), how| {
        let mut tensors = adapter(Dtype::F32, Some(HIDDEN));
        of(&mut tensors);
        load(&tensors, how).unwrap_err()
    };
    let at = |name: String, tensor: Tensor| {
        move |tensors: &mut Vec<Tensor>| {
            let i = tensors.iter().position(|t| t.name == name).unwrap();
            tensors[i] = tensor.clone();
        }
    };
    let span = PeftUse::Span;
    let gone = name(1, "v_proj", "A");
    let error = change(&|t| t.retain(|t| t.name != gone), span);
    assert!(matches!(&error, FittedError::Missing { name } if gone.ends_with(name)), "{error}");
    let error = change(&|t| t.retain(|t| !t.name.contains("k_proj") && !t.name.contains("v_proj")), span);
    assert!(matches!(error, FittedError::Empty), "{error}");
    let error = change(
        &|t| t.push(tensor(format!("other.{}", name(0, "k_proj", "B")), Dtype::F32, [1, 1], &[1.0])),
        span,
    );
    assert!(error.to_string().contains("both end with"), "{error}");
    // Without its prefix a name is as good; one that only ends alike is another's.
    let mut tensors = adapter(Dtype::F32, Some(HIDDEN));
    tensors.push(tensor("xlayers.0.self_attn.k_proj.lora_B.weight".into(), Dtype::F32, [1, 1], &[1.0]));
    load(&tensors, span).unwrap();

    let k_b = || name(0, "k_proj", "B");
    let zeros = tensor(k_b(), Dtype::F32, [12, 3], &[0.0; 36]);
    let error = change(&at(k_b(), zeros), span);
    assert!(error.to_string().contains("lora_B is 0"), "{error}");
    for shape in [[11, 3], [12, 2], [3, 12]] {
        let wrong = tensor(k_b(), Dtype::F32, shape, &vec![1.0; shape[0] * shape[1]]);
        let error = change(&at(k_b(), wrong), span);
        assert!(matches!(&error, FittedError::Tensor { wanted, .. } if wanted == "[12, 3]"), "{error}");
    }
    let doubles = tensor(k_b(), Dtype::F64, [12, 3], &[1.0; 36]);
    assert!(change(&at(k_b(), doubles), span).to_string().contains("F32, F16 or BF16"));
    for bad in [f32::NAN, f32::INFINITY] {
        let mut values = matrix(1, 36);
        values[5] = bad;
        let error = change(&at(k_b(), tensor(k_b(), Dtype::F32, [12, 3], &values)), span);
        assert!(error.to_string().contains("value 5 of"), "{error}");
    }
    // A reads hidden states here, not keys.
    let error = change(&|_| (), PeftUse::Reconstruction);
    assert!(matches!(&error, FittedError::Tensor { wanted, .. } if wanted == "[3, 12]"), "{error}");
    for config in [CONFIG.rank(0), CONFIG.alpha(f32::NAN)] {
        let bytes = file(&adapter(Dtype::F32, None));
        let error = Fitted::from_peft(&bytes, config, span, SHAPE, "m").unwrap_err();
        assert!(matches!(error, FittedError::Peft { .. }), "{error}");
    }
    assert!(matches!(Fitted::from_peft(b"nonsense", CONFIG, span, SHAPE, "m"), Err(FittedError::File(_))));
}
