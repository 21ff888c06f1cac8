//! AdaKV: the heads of a layer share their budgets (arXiv 2407.11550, algorithm 1).

use std::cmp::Ordering;

/// Which tokens go, so that `target` stay over all heads: of each head the best `floor * quota` stay, and of the rest the best of
/// all heads together. Of equals the older goes first, then the one of the higher head.
///
/// Utilities are compared between heads as they are; attention mass, which sums to the number of query heads in each, can be.
/// O(n log n) in the tokens of the layer.
pub(crate) fn victims(utilities: &[&[f32]], quota: &[u32], floor: f32, target: u64) -> Vec<Vec<usize>> {
    let worth = |h: usize, i: usize| {
        let u = utilities[h][i];
        if u.is_nan() { f32::NEG_INFINITY } else { u }
    };
    // Best first.
    let order = |a: &(usize, usize), b: &(usize, usize)| -> Ordering {
        worth(b.0, b.1).total_cmp(&worth(a.0, a.1)).then(b.1.cmp(&a.1)).then(a.0.cmp(&b.0))
    };
    let mut rest: Vec<(usize, usize)> = Vec::new();
    let mut kept = 0;
    for (h, tokens) in utilities.iter().enumerate() {
        let mut own: Vec<(usize, usize)> = (0..tokens.len()).map(|i| (h, i)).collect();
        own.sort_unstable_by(order);
        let sure = (f64::from(quota[h]) * f64::from(floor)) as usize;
        let sure = sure.min(own.len()).min((target - kept) as usize);
        kept += sure as u64;
        rest.extend(own.drain(sure..));
    }
    rest.sort_unstable_by(order);
    let mut gone = vec![Vec::new(); utilities.len()];
    for (h, i) in rest.into_iter().skip((target - kept) as usize) {
        gone[h].push(i);
    }
    gone
}

#[cfg(test)]
mod tests {
    use super::victims;

    #[test]
    fn the_best_of_all_heads_stay_and_each_head_keeps_its_floor() {
        let a = [0.9, 0.8, 0.7, 0.6];
        let b = [0.5, 0.1, 0.2, 0.3];
        // 4 of 8 stay: head 1 keeps floor(0.5 * 2) = 1 of its own, head 0 gets the other 3.
        assert_eq!(victims(&[&a, &b], &[2, 2], 0.5, 4), [vec![3], vec![3, 2, 1]]);
        // Without a floor head 0 keeps all of its tokens.
        assert_eq!(victims(&[&a, &b], &[2, 2], 0.0, 4), [vec![], vec![0, 3, 2, 1]]);
        // With all of it each keeps its own two.
        assert_eq!(victims(&[&a, &b], &[2, 2], 1.0, 4), [vec![2, 3], vec![2, 1]]);
        // Of equals the older goes, and what is not a number before everything.
        assert_eq!(
            victims(&[&[0.5, 0.5, f32::NAN], &[0.5, 0.5, 0.5]], &[1, 1], 0.0, 2),
            [vec![1, 0, 2][1..].to_vec(), vec![1, 0]]
        );
    }
}
