//! AdaKV: the heads of a layer share their budgets (arXiv 2407.11550, algorithm 1).

use std::cmp::Ordering;

/// The tokens of a head that may be evicted, by ascending position.
pub(crate) struct HeadTokens<'a> {
    pub utility: &'a [f32],
    pub positions: Vec<u32>,
    /// Number of its best tokens that are kept whatever the other heads hold.
    pub sure: usize,
}

/// Indices of the tokens to evict, for each head, so that `target` tokens are kept over all heads: the `sure` best of each head, and the
/// best of the rest over all heads. Of equals the older is evicted first, then that of the higher head.
///
/// Utilities are compared between heads without scaling. Attention mass can be compared so: it sums to the number of query heads in each
/// head. O(n log n) in the tokens of the layer.
pub(crate) fn victims(heads: &[HeadTokens<'_>], target: u64) -> Vec<Vec<usize>> {
    let worth = |(h, i): (usize, usize)| super::worth(heads[h].utility[i]);
    let position = |(h, i): (usize, usize)| heads[h].positions[i];
    // Best first.
    let order = |a: &(usize, usize), b: &(usize, usize)| -> Ordering {
        worth(*b).total_cmp(&worth(*a)).then(position(*b).cmp(&position(*a))).then(a.0.cmp(&b.0))
    };
    let mut rest: Vec<(usize, usize)> = Vec::new();
    let mut kept = 0;
    for (h, head) in heads.iter().enumerate() {
        let mut own: Vec<(usize, usize)> = (0..head.utility.len()).map(|i| (h, i)).collect();
        own.sort_unstable_by(order);
        let sure = head.sure.min(own.len()).min((target - kept) as usize);
        kept += sure as u64;
        rest.extend(own.drain(sure..));
    }
    rest.sort_unstable_by(order);
    let mut gone = vec![Vec::new(); heads.len()];
    for (h, i) in rest.into_iter().skip((target - kept) as usize) {
        gone[h].push(i);
    }
    gone
}

#[cfg(test)]
mod tests {
    use super::{HeadTokens, victims};

    fn gone(utilities: &[&[f32]], sure: usize, target: u64) -> Vec<Vec<usize>> {
        let head = |utility| HeadTokens { utility, positions: (0..4).collect(), sure };
        victims(&utilities.iter().map(|u| head(*u)).collect::<Vec<_>>(), target)
    }

    #[test]
    fn the_best_of_all_heads_stay_and_each_head_keeps_its_floor() {
        let a = [0.9, 0.8, 0.7, 0.6];
        let b = [0.5, 0.1, 0.2, 0.3];
        // 4 of 8 stay: head 1 keeps 1 of its own, head 0 gets the other 3.
        assert_eq!(gone(&[&a, &b], 1, 4), [vec![3], vec![3, 2, 1]]);
        // Without a floor head 0 keeps all of its tokens.
        assert_eq!(gone(&[&a, &b], 0, 4), [vec![], vec![0, 3, 2, 1]]);
        // With all of it each keeps its own two.
        assert_eq!(gone(&[&a, &b], 2, 4), [vec![2, 3], vec![2, 1]]);
        // Of equals the older is evicted, and NaN before every number.
        assert_eq!(gone(&[&[0.5, 0.5, f32::NAN], &[0.5, 0.5, 0.5]], 0, 2), [vec![0, 2], vec![1, 0]]);
    }

    #[test]
    fn of_equals_the_older_goes_whatever_its_place_in_its_head() {
        let old = HeadTokens { utility: &[0.5, 0.5], positions: vec![10, 11], sure: 0 };
        let new = HeadTokens { utility: &[0.5], positions: vec![12], sure: 0 };
        assert_eq!(victims(&[old, new], 1), [vec![1, 0], vec![]]);
    }
}
