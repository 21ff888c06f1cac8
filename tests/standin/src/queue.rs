//! Work that was requested of streams and is not done yet.

use crate::{Device, ILLEGAL_ADDRESS};
use std::collections::{BTreeMap, VecDeque};
use std::slice;

/// Work of a stream.
pub(crate) enum Work {
    /// A copy of bytes from this address of the host.
    Up { to: u64, from: usize, bytes: usize },
    /// A copy of bytes to this address of the host.
    Down { to: usize, from: u64, bytes: usize },
    /// A fill.
    Fill { to: u64, bytes: Vec<u8> },
    /// A launch of an entry of a module.
    Launch { module: u64, entry: String, grid: u32, block: u32, arguments: Vec<Vec<u8>> },
    /// A wait for the work of another stream up to this number.
    Wait { stream: u64, last: u64 },
}

/// Work with its number among all that was requested of the device.
struct Task {
    number: u64,
    work: Work,
}

/// Work of each stream, in order.
#[derive(Default)]
pub(crate) struct Queues(BTreeMap<u64, VecDeque<Task>>);

impl Queues {
    /// Whether a stream has work up to that number.
    pub fn has(&self, stream: u64, last: u64) -> bool {
        self.0.get(&stream).and_then(VecDeque::front).is_some_and(|task| task.number <= last)
    }

    /// Forgets all work.
    pub fn clear(&mut self) {
        self.0.clear();
    }

    fn pop(&mut self, stream: u64) -> Option<Task> {
        let queue = self.0.get_mut(&stream)?;
        let task = queue.pop_front();
        if queue.is_empty() {
            self.0.remove(&stream);
        }
        task
    }

    /// A stream other than `stream` whose next work is a copy or a fill, or a wait for nothing.
    fn ready(&self, stream: u64) -> Option<u64> {
        let is_ready = |queue: &VecDeque<Task>| match queue.front().map(|task| &task.work) {
            Some(Work::Up { .. } | Work::Fill { .. }) => true,
            Some(Work::Wait { stream, last }) => !self.has(*stream, *last),
            _ => false,
        };
        self.0.iter().find(|(other, queue)| **other != stream && is_ready(queue)).map(|(other, _)| *other)
    }
}

impl Device {
    /// Takes work of a stream. Copies up wait until something else is requested of the stream, and in [`LATE`](crate::LATE) mode all work
    /// waits.
    pub fn request(&mut self, stream: u64, work: Work) {
        self.asked += 1;
        let waits = self.late || matches!(work, Work::Up { .. });
        self.queues.0.entry(stream).or_default().push_back(Task { number: self.asked, work });
        if !waits {
            self.finish(stream, u64::MAX);
        }
    }

    /// Does the work of a stream up to number `last`. In [`LATE`](crate::LATE) mode copies of other streams are done before, as early as
    /// their waits allow.
    pub fn finish(&mut self, stream: u64, last: u64) {
        while self.queues.has(stream, last) {
            while let Some(other) = self.queues.ready(stream).filter(|_| self.late) {
                self.next(other);
            }
            self.next(stream);
        }
    }

    /// Does all work of all streams.
    pub fn finish_all(&mut self) {
        while let Some(stream) = self.queues.0.keys().next().copied() {
            self.finish(stream, u64::MAX);
        }
    }

    /// Does the next work of a stream; none once the device is lost, or if calls are only counted.
    fn next(&mut self, stream: u64) {
        let Some(Task { number, work }) = self.queues.pop(stream) else { return };
        if self.lost.is_some() || self.counts {
            return;
        }
        let done = match work {
            Work::Up { to, from, bytes } => {
                // SAFETY: the caller of the copy promised that the bytes stay valid until it is done.
                let from = unsafe { slice::from_raw_parts(from as *const u8, bytes) };
                self.memory.write(to, from).map_err(|cause| format!("copy up: {cause:x?}"))
            }
            Work::Down { to, from, bytes } => match self.memory.read::<u8>(from, bytes) {
                Ok(bytes) => {
                    self.landing.push(Down { stream, number, to, bytes });
                    Ok(())
                }
                Err(cause) => Err(format!("copy down: {cause:x?}")),
            },
            Work::Fill { to, bytes } => {
                self.memory.write(to, &bytes).map_err(|cause| format!("fill: {cause:x?}"))
            }
            Work::Launch { module, entry, grid, block, arguments } => {
                let arguments: Vec<&[u8]> = arguments.iter().map(Vec::as_slice).collect();
                match self.programs.get_mut(&module) {
                    Some(program) => program
                        .launch(&mut self.memory, &entry, grid, block, &arguments)
                        .map_err(|fault| format!("{entry}: {fault}")),
                    None => Err(format!("{entry}: its module was unloaded before it ran")),
                }
            }
            Work::Wait { stream, last } => {
                self.finish(stream, last);
                Ok(())
            }
        };
        if let Err(what) = done {
            self.fail(&what);
        }
    }

    /// Delivers the copies to the host of `stream` up to number `last`; of all streams for `None`.
    pub fn land(&mut self, stream: Option<u64>, last: u64) {
        let due = |down: &mut Down| stream.is_none_or(|stream| down.stream == stream) && down.number <= last;
        for Down { to, bytes, .. } in self.landing.extract_if(.., due) {
            // SAFETY: the caller of the copy promised that the memory stays valid until it is done.
            unsafe { (to as *mut u8).copy_from(bytes.as_ptr(), bytes.len()) };
        }
        if let Some(stream) = stream {
            let passed = self.passed.entry(stream).or_default();
            *passed = last.min(self.asked).max(*passed);
        }
    }

    /// Whether a wait for an event has work to do.
    pub fn under_way(&self, event: u64) -> bool {
        let Some((stream, last)) = self.events.get(&event).copied() else { return false };
        let downs = self.landing.iter().any(|down| down.stream == stream && down.number <= last);
        let slow = self.slow && self.passed.get(&stream).is_none_or(|passed| *passed < last);
        self.queues.has(stream, last) || downs || slow
    }

    /// Loses the device, and says why.
    pub fn fail(&mut self, what: &str) -> u32 {
        eprintln!("stand-in: {what}");
        self.lost = Some(ILLEGAL_ADDRESS);
        ILLEGAL_ADDRESS
    }
}

/// A copy to the host that is not delivered yet.
pub(crate) struct Down {
    stream: u64,
    number: u64,
    to: usize,
    bytes: Vec<u8>,
}
