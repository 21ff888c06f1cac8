//! Results whose bits stand here as numbers: every processor, with whatever lanes it has, returns these.

#[allow(dead_code, reason = "the bench uses the rest")]
mod pages;

use pages::{Form, Pages, bits, noise};
use pikv_core::score::Ranking;
use pikv_lanes::{Lanes, route};

/// The bits of 4 query rows, and of 32, over two blocks of pages in each form of [`Form::all`].
const ATTENTION: [[u64; 2]; 16] = [
    // Full(F32)
    [0x48f8_d79d_46ac_9492, 0x4f2b_e8db_a1e3_54eb],
    // Full(F16)
    [0x71dd_f2c8_7c35_7198, 0x8135_92bb_ee42_9252],
    // Full(Bf16)
    [0xb9f2_b77c_b23e_546a, 0x4523_d321_580b_d1d3],
    // Packed(F32)
    [0x48f8_d79d_46ac_9492, 0x4f2b_e8db_a1e3_54eb],
    // Packed(F16)
    [0x18b8_eaf2_b285_5bcd, 0xb716_8e50_a2a0_0285],
    // Packed(Bf16)
    [0x320c_36e9_a48c_e1cf, 0x9762_c900_c326_91ee],
    // Packed(Int8)
    [0x8d07_a4a7_98b2_56a2, 0x8dbb_2d66_15c0_5523],
    // Packed(Int4)
    [0xd4ae_7e79_b0a5_ae9b, 0x9411_11ea_9206_d0b3],
    // Packed(E4m3)
    [0x08b3_fbf8_e888_2799, 0x2d62_212b_1921_2523],
    // Packed(E5m2)
    [0xcaf9_f4ac_b4b2_dd98, 0xc1ef_2af6_9638_1af1],
    // Packed(Int2)
    [0x9845_6248_2638_815c, 0xdae3_3950_15dd_b873],
    // Packed(Int3)
    [0x38d7_ed6d_dbfb_656e, 0x10a9_7e7b_4de0_616d],
    // Packed(Int5)
    [0x1a3c_6d8d_2477_017d, 0x659f_5392_fa9d_0179],
    // Packed(Int6)
    [0x7680_1353_109b_ce9f, 0xefee_1621_9736_0d17],
    // Packed(Mxfp4)
    [0xb3cd_f575_859a_d1a9, 0xff5f_5638_8b63_e5ab],
    // Packed(Nvfp4)
    [0x42ca_ccad_52f4_d41a, 0x2678_10d9_3903_ce86],
];

/// The bits of routing by so many experts: mixture weights, then averages of binary entropies.
const ROUTING: [(usize, u64); 4] = [
    (8, 0x1172_5f43_1303_ee22),
    (64, 0x1586_ec3e_87e3_fef1),
    (300, 0xf40f_f412_48b5_34a1),
    (1024, 0x8eea_743e_f555_72c9),
];

#[test]
fn attention_has_the_same_bits_on_every_processor() {
    assert_eq!(Form::all().count(), ATTENTION.len(), "a row for each form, in their order");
    for lanes in Lanes::available() {
        for (form, want) in Form::all().zip(ATTENTION) {
            let pages = Pages::new(form, lanes);
            let found = [4, 32].map(|rows| bits(&pages.attend(lanes, rows, 2)));
            assert_eq!(found, want, "{form:?} on {}: {found:#018x?}", lanes.name());
        }
    }
}

#[test]
fn routing_has_the_same_bits_on_every_processor() {
    for lanes in Lanes::available() {
        for (experts, want) in ROUTING {
            let logits: Vec<f32> = noise(7, 16 * experts).iter().map(|x| 4.0 * x).collect();
            let (mut chosen, mut results) = ([0; 16 * 4], vec![0.0; 16 * 4]);
            route::rank(lanes, &logits, experts, 4, Ranking::default(), &mut chosen, &mut results);
            let mut h = vec![0.0; experts];
            route::binary_entropy(lanes, &logits, 0.9, &mut h);
            results.extend(chosen.map(f32::from));
            results.extend(h);
            let found = bits(&results);
            assert_eq!(found, want, "{experts} experts on {}: {found:#018x}", lanes.name());
        }
    }
}
