//! DeepSeek's expert-parallel load balancer: places replicas of experts on devices.
//!
//! Implements the published algorithm (github.com/deepseek-ai/EPLB; DeepSeek-V3, arXiv 2412.19437, 3.4.2). Hierarchical: groups
//! of experts are packed onto nodes, the loaded experts of each node are replicated, and the replicas are packed onto its devices.
//! Global: the same with one group and one node. Packing is greedy: the heaviest item first, to the lightest pack with room. Of
//! equals the lower index is first.

use thiserror::Error;

/// Sizes of a placement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Eplb {
    /// Expert slots over all devices, at least one an expert.
    pub replicas: u32,
    /// Groups of consecutive experts, each to stay on one node; they divide the experts.
    pub groups: u32,
    /// Nodes; they divide the groups and the devices.
    pub nodes: u32,
    /// Devices over all nodes; they divide the replicas.
    pub devices: u32,
}

/// Sizes or loads without a placement.
#[derive(Clone, Copy, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum EplbError {
    /// A size of 0.
    #[error("0 {0}; there must be at least 1")]
    Zero(&'static str),
    /// A size that does not divide another.
    #[error("{count} {what} over {over} {which}: they must divide evenly")]
    Uneven {
        /// Items to spread.
        what: &'static str,
        /// Number of items.
        count: usize,
        /// Containers to spread them over.
        which: &'static str,
        /// Number of containers.
        over: usize,
    },
    /// Fewer slots than experts.
    #[error("{replicas} replicas for {experts} experts; there must be one for each")]
    Replicas {
        /// Number of slots.
        replicas: u32,
        /// Number of experts.
        experts: usize,
    },
    /// A load that is negative or not finite.
    #[error("load of expert {expert}: {load} must be finite and at least 0")]
    Load {
        /// Index of the expert.
        expert: usize,
        /// The load.
        load: f64,
    },
}

/// The replicas of one layer.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Placement {
    /// `[replicas]` the expert in each slot (phy2log). Device d has the `replicas / devices` slots from `d * replicas / devices` on.
    pub expert_of: Vec<u32>,
    /// `[experts]` the slots of each expert (log2phy), in the order in which replicas were added.
    pub slots_of: Vec<Vec<u32>>,
}

impl Placement {
    /// `[experts]` replicas of each expert.
    pub fn counts(&self) -> Vec<u32> {
        self.slots_of.iter().map(|slots| slots.len() as u32).collect()
    }
}

impl Eplb {
    /// Keeps each group on one node: for decoding with slow links between nodes.
    pub fn hierarchical(replicas: u32, groups: u32, nodes: u32, devices: u32) -> Eplb {
        Eplb { replicas, groups, nodes, devices }
    }

    /// Places any expert on any device.
    pub fn global(replicas: u32, devices: u32) -> Eplb {
        Eplb { replicas, groups: 1, nodes: 1, devices }
    }

    /// Places the experts of one layer by their `loads`, `[experts]` in any unit, such as tokens.
    /// O(replicas * (experts / nodes + devices)).
    ///
    /// # Errors
    /// [`EplbError::Zero`], [`EplbError::Uneven`] for sizes that do not divide, [`EplbError::Replicas`] for fewer replicas than experts,
    /// [`EplbError::Load`] for a load that is negative or not finite.
    ///
    /// ```
    /// # use pikv_host as pikv;
    /// use pikv::router::Eplb;
    /// let loads = [90., 132., 40., 61., 104., 165., 39., 4., 73., 56., 183., 86.];
    /// let placement = Eplb::hierarchical(16, 4, 2, 8).place(&loads).unwrap();
    /// assert_eq!(placement.expert_of, [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1]);
    /// ```
    pub fn place(&self, loads: &[f64]) -> Result<Placement, EplbError> {
        self.check(loads)?;
        let experts = loads.len();
        let (groups, nodes) = (self.groups as usize, self.nodes as usize);
        let size = experts / groups;
        let slots = self.replicas as usize / nodes;
        let of_groups: Vec<f64> = loads.chunks_exact(size).map(|group| group.iter().sum()).collect();
        let mut placement =
            Placement { expert_of: vec![0; self.replicas as usize], slots_of: vec![vec![]; experts] };
        for (node, members) in pack(&of_groups, nodes).into_iter().enumerate() {
            // The node's experts, group by group in packing order.
            let here: Vec<usize> = members.iter().flat_map(|g| g * size..(g + 1) * size).collect();
            let replicas = replicate(&here, loads, slots);
            let mut count = vec![0u32; experts];
            replicas.iter().for_each(|e| count[*e] += 1);
            let of_replicas: Vec<f64> = replicas.iter().map(|e| loads[*e] / f64::from(count[*e])).collect();
            let mut slot_of = vec![0; slots];
            let packed = pack(&of_replicas, self.devices as usize / nodes);
            for (slot, replica) in packed.into_iter().flatten().enumerate() {
                slot_of[replica] = node * slots + slot;
            }
            for (expert, slot) in replicas.into_iter().zip(slot_of) {
                placement.expert_of[slot] = expert as u32;
                placement.slots_of[expert].push(slot as u32);
            }
        }
        Ok(placement)
    }

    fn check(&self, loads: &[f64]) -> Result<(), EplbError> {
        let experts = loads.len();
        let sizes = [
            ("experts", experts),
            ("replicas", self.replicas as usize),
            ("groups", self.groups as usize),
            ("nodes", self.nodes as usize),
            ("devices", self.devices as usize),
        ];
        if let Some((what, _)) = sizes.iter().find(|(_, n)| *n == 0) {
            return Err(EplbError::Zero(what));
        }
        let [experts_, replicas, groups, nodes, devices] = sizes;
        for ((what, count), (which, over)) in
            [(experts_, groups), (groups, nodes), (devices, nodes), (replicas, devices)]
        {
            if !count.is_multiple_of(over) {
                return Err(EplbError::Uneven { what, count, which, over });
            }
        }
        if (self.replicas as usize) < experts {
            return Err(EplbError::Replicas { replicas: self.replicas, experts });
        }
        match loads.iter().position(|load| !(*load >= 0.0 && load.is_finite())) {
            Some(expert) => Err(EplbError::Load { expert, load: loads[expert] }),
            None => Ok(()),
        }
    }
}

/// Packs items into packs of equal size: the heaviest first, each to the lightest pack with room. Returns each pack's items in the
/// order in which they were added.
fn pack(weights: &[f64], packs: usize) -> Vec<Vec<usize>> {
    let room = weights.len() / packs;
    if room == 1 {
        // Nothing to balance: keep the items in order, as the published code does.
        return (0..packs).map(|item| vec![item]).collect();
    }
    let mut order: Vec<usize> = (0..weights.len()).collect();
    order.sort_by(|a, b| weights[*b].total_cmp(&weights[*a]));
    let mut items = vec![vec![]; packs];
    let mut sums = vec![0.0; packs];
    for item in order {
        let mut lightest = None;
        for pack in 0..packs {
            if items[pack].len() < room && lightest.is_none_or(|l: usize| sums[pack] < sums[l]) {
                lightest = Some(pack);
            }
        }
        if let Some(pack) = lightest {
            items[pack].push(item);
            sums[pack] += weights[item];
        }
    }
    items
}

/// One replica of each of `experts`, then, up to `slots`, one more of the expert with the most load a replica.
fn replicate(experts: &[usize], loads: &[f64], slots: usize) -> Vec<usize> {
    let mut replicas = experts.to_vec();
    let mut count = vec![1.0; experts.len()];
    while replicas.len() < slots {
        let mut most = 0;
        for i in 1..experts.len() {
            if loads[experts[i]] / count[i] > loads[experts[most]] / count[most] {
                most = i;
            }
        }
        replicas.push(experts[most]);
        count[most] += 1.0;
    }
    replicas
}
