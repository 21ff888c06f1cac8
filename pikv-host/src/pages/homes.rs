//! Home experts of the tokens of a page whose run several experts share.

use crate::base::error::Error;
use crate::base::fields::{Fields, sure};
use pikv_core::page::PAGE;
use std::sync::Arc;

/// Words of saved homes.
const WORDS: usize = PAGE as usize / 2;

/// Home expert of each lane of a page; no list if all are the expert that gives the run its number. Forks share the list.
#[derive(Clone, Debug, Default)]
pub(crate) struct Homes(Option<Arc<[u16; PAGE as usize]>>);

impl Homes {
    /// Home expert of a lane in run `run`.
    pub fn get(&self, run: u16, lane: u32) -> u16 {
        self.0.as_ref().map_or(run, |homes| homes[lane as usize])
    }

    /// Sets the home expert of a lane in run `run`.
    pub fn set(&mut self, run: u16, lane: u32, home: u16) {
        if self.0.is_some() || home != run {
            let homes = self.0.get_or_insert_with(|| Arc::new([run; PAGE as usize]));
            Arc::make_mut(homes)[lane as usize] = home;
        }
    }

    /// Lanes, a bit each, whose home is one of `experts`. A lane that was never written may be among them.
    pub fn among(&self, run: u16, experts: &[u16]) -> u32 {
        let Some(homes) = &self.0 else {
            return if experts.contains(&run) { u32::MAX } else { 0 };
        };
        let of = |expert: &u16| {
            homes.iter().zip(0..).fold(0, |lanes, (home, lane)| lanes | u32::from(home == expert) << lane)
        };
        experts.iter().map(of).fold(0, |all, lanes| all | lanes)
    }

    /// Whether there is a list.
    pub fn is_listed(&self) -> bool {
        self.0.is_some()
    }

    /// Bytes of the list.
    pub fn bytes(&self) -> usize {
        self.0.as_deref().map_or(0, size_of_val)
    }

    /// Adds the list, two experts a word; nothing without one.
    pub fn save(&self, to: &mut Vec<u32>) {
        let halves = self.0.iter().flat_map(|homes| homes.as_chunks::<2>().0);
        to.extend(halves.map(|[low, high]| u32::from(*low) | u32::from(*high) << 16));
    }

    /// Reads the list of [`Homes::save`].
    ///
    /// # Errors
    /// [`content`](crate::base::fields::content) for an expert that is not below `experts`.
    pub fn load(from: &mut Fields<'_>, experts: u32) -> Result<Homes, Error> {
        let words = from.slice(WORDS)?;
        let homes: [u16; PAGE as usize] =
            std::array::from_fn(|lane| (words[lane / 2] >> (lane % 2 * 16)) as u16);
        sure(homes.iter().all(|home| u32::from(*home) < experts), "an expert that is not there")?;
        Ok(Homes(Some(Arc::new(homes))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_exists_from_the_first_other_expert_on() {
        let mut homes = Homes::default();
        homes.set(3, 0, 3);
        assert!(!homes.is_listed());
        assert_eq!((homes.among(3, &[1, 3]), homes.among(3, &[1])), (u32::MAX, 0));
        homes.set(3, 1, 11);
        homes.set(3, 2, 3);
        assert_eq!([0, 1, 2].map(|lane| homes.get(3, lane)), [3, 11, 3]);
        assert_eq!(homes.among(3, &[11, 19]), 0b10);
        assert_eq!(homes.among(3, &[3, 11]), u32::MAX);
        let mut words = Vec::new();
        homes.save(&mut words);
        let read = Homes::load(&mut Fields::new(&words), 12).unwrap();
        assert_eq!(read.among(3, &[11]), 0b10);
        assert!(Homes::load(&mut Fields::new(&words), 11).is_err());
    }
}
