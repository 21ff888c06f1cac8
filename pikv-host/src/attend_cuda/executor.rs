//! Attention on a device: the rows of a call in waves, with results copied to the host or left on the device.

use crate::attend::executor::{Executor, Results, Session, TaskLists};
use crate::attend::feedback::HeadFeedback;
use crate::attend::forest::Forest;
use crate::attend::job::{Job, TILE, Widest};
use crate::attend::mass::WeightSets;
use crate::attend_cuda::attend::{Ends, Shape, To, WAVE};
use crate::attend_cuda::deferred::{Deferred, Readback};
use crate::attend_cuda::wave::{Wave, most};
use crate::base::device_slice::DeviceOutput;
use crate::base::error::Error;
use crate::device::Device;
use crate::device::work::WorkBuffers;
use pikv_core::dtype::Dtype;
use pikv_core::warp::LANES;
use pikv_kernels::args::TensorArg;
use std::mem;
use std::ops::Range;
use std::sync::Arc;

/// Attention on a device.
#[derive(Debug)]
pub(crate) struct Cuda(pub Arc<Device>);

impl Executor for Cuda {
    fn widest(&self) -> Widest {
        |_, codecs| most(codecs.into_iter().flatten())
    }

    fn run(
        &self,
        job: &mut Job<'_>,
        forests: &[Forest<'_>],
        wanted: Option<&[WeightSets]>,
        results: Results<'_>,
        _: &mut TaskLists,
    ) -> Result<(), Error> {
        let done = attend_all(&self.0, job, forests, wanted, results);
        if done.is_err() {
            // Waits for launched work, so that nothing still reads pages that were copied to the device for it.
            let _ = self.0.stream.synchronize();
        }
        done
    }

    fn session(&self, layers: usize) -> Result<Option<Box<dyn Session>>, Error> {
        Ok(Some(Box::new(Deferred::new(&self.0, layers)?)))
    }
}

/// Attention of the forests of a job. `out` is `[rows][query_heads][v_dim]`, `lse` `[rows][query_heads]`. `wanted` has, for each view,
/// the rows whose weights are added up for each forest's pages.
fn attend_all(
    device: &Device,
    job: &Job<'_>,
    forests: &[Forest<'_>],
    wanted: Option<&[WeightSets]>,
    results: Results<'_>,
) -> Result<(), Error> {
    let Results { mut out, lse, seen: feeds } = results;
    if lse.is_empty() {
        return Ok(());
    }
    let mut work = device.work()?;
    let stream = &device.stream;
    let (firsts, masses) = rows_of_masses(forests, wanted);
    let floats = out.len() + 3 * lse.len() + LANES * masses;
    let first = work.out(stream, floats as u64)?;
    let ends = first + 4 * out.len() as u64;
    let out_at = TensorArg::new(first, Dtype::F32);
    let to = To { out: out_at, ends: Ends::Host(ends), mass: ends + 12 * lse.len() as u64 };
    let blank = forests.iter().any(|forest| forest.blocks.is_empty());
    let attended = job.attended();
    let rows: usize = attended.iter().map(Range::len).sum();
    let left_out = rows * (job.shape.query_heads as usize) < lse.len();
    if masses > 0 || blank || left_out {
        // Sums accumulate over waves; and no kernel writes the output of rows without pages or of sequences that were left out.
        device.fill(first, 0, floats as u32)?;
    }
    waves(device, &mut work, job, forests, wanted, to, &firsts)?;
    work.fetch(stream, first, floats, |words| {
        let floats: &[f32] = bytemuck::cast_slice(words);
        let (from, rest) = floats.split_at(out.len());
        let (ends, mass) = rest.split_at(3 * lse.len());
        let (width, heads) = (from.len() / lse.len(), job.shape.query_heads as usize);
        for rows in attended {
            let of = rows.start * heads..rows.end * heads;
            let own = of.start * width..of.end * width;
            let beyond = out.part(own.start, own.len()).write(&from[own.clone()]);
            job.note_beyond(beyond.map(|(i, value)| (own.start + i, value)));
            for at in of {
                let [end, m, l] = ends.as_chunks().0[at];
                lse[at] = end;
                job.judge(at, m, l, &from[at * width..][..width]);
            }
        }
        let Some(wanted) = wanted else { return };
        for ((forest, first), feed) in forests.iter().zip(&firsts).zip(feeds) {
            let weighed = &mut feed.weighed;
            weighed.start(forest, &wanted[forest.view]);
            weighed.fill(&mass.as_chunks().0[*first..]);
            weighed.one_form(forest.passes());
        }
    })?;
    for forest in forests.iter().filter(|forest| forest.blocks.is_empty()) {
        for item in job.items(forest, TILE) {
            (0..item.rows).for_each(|r| lse[job.output_row(&item, r)] = f32::NEG_INFINITY);
        }
    }
    Ok(())
}

/// For each forest its first row of masses, and the number of rows of all.
fn rows_of_masses(forests: &[Forest<'_>], wanted: Option<&[WeightSets]>) -> (Vec<usize>, usize) {
    let (mut firsts, mut masses) = (Vec::with_capacity(forests.len()), 0);
    for forest in forests {
        firsts.push(masses);
        masses += wanted.map_or(0, |wanted| wanted[forest.view].sets().count()) * forest.pages.len();
    }
    (firsts, masses)
}

/// Launches all rows of forests with pages, in waves of limited size.
fn waves(
    device: &Device,
    work: &mut WorkBuffers,
    job: &Job<'_>,
    forests: &[Forest<'_>],
    wanted: Option<&[WeightSets]>,
    to: To,
    firsts: &[usize],
) -> Result<(), Error> {
    let most = if wanted.is_some() { job.whole() } else { TILE };
    let mut wave = Wave::default();
    let go = |wave: &mut Wave<'_>, work: &mut WorkBuffers| {
        let wave = mem::take(wave);
        let masses = wanted.map_or_else(Vec::new, |wanted| wave.masses(job, forests, wanted, firsts));
        wave.launch(device, work, &Shape::of(job), Some((to, &masses)))
    };
    for (index, forest) in forests.iter().enumerate().filter(|(_, forest)| !forest.blocks.is_empty()) {
        for item in job.items(forest, Wave::step(job, forest, most)) {
            if wave.size > 0 && wave.size + Wave::cost(job, &item, wanted.is_some()) > WAVE {
                go(&mut wave, work)?;
            }
            wave.push(job, index, &item, wanted.is_some());
        }
    }
    if wave.size > 0 {
        go(&mut wave, work)?;
    }
    Ok(())
}

/// [`attend_all`] with queries and results on the device. Does not wait: returns the layout of the masses, and of the queries if they are
/// asked for, which are on their way to the host.
pub(crate) fn attend_in_place(
    job: &Job<'_>,
    forests: &[Forest<'_>],
    wanted: Option<&[WeightSets]>,
    output: DeviceOutput,
    feeds: &mut Vec<HeadFeedback>,
    queries: bool,
    late: &Deferred,
) -> Result<Readback, Error> {
    let device = late.device().clone();
    let mut work = device.work()?;
    let stream = &device.stream;
    let (firsts, rows) = rows_of_masses(forests, wanted);
    let floats = LANES * rows;
    let mass = if rows > 0 { work.out(stream, floats as u64)? } else { 0 };
    if rows > 0 {
        device.fill(mass, 0, floats as u32)?;
    }
    let (out, lse) = (output.out, output.lse);
    if forests.iter().any(|forest| forest.blocks.is_empty()) {
        let (heads, v_dim) = (job.shape.query_heads as usize, job.shape.layout.v_dim as usize);
        for rows in job.attended() {
            let (first, ends) = (rows.start * heads, rows.len() * heads);
            device.zero(out.part(first * v_dim, ends * v_dim))?;
            if let Some(lse) = lse {
                device.fill(lse.part(first, ends).address(), f32::NEG_INFINITY.to_bits(), ends as u32)?;
            }
        }
    }
    let ends = Ends::Device { lse: lse.map_or(0, |lse| lse.address()), faults: late.fault(job.layer, 3) };
    waves(&device, &mut work, job, forests, wanted, To { out: out.into(), ends, mass }, &firsts)?;
    let mut readback = Readback {
        rows,
        q: job.on_device.filter(|_| queries).map(|on_device| on_device.q),
        ..Readback::default()
    };
    let places = [(mass, 4 * floats), readback.q.map_or((0, 0), |q| (q.address(), q.bytes()))];
    if places.iter().any(|(_, bytes)| *bytes > 0) {
        readback.down = Some(device.downs.bring(stream, &places)?);
    }
    if let Some(wanted) = wanted {
        for ((forest, first), feed) in forests.iter().zip(firsts).zip(feeds.iter_mut()) {
            feed.weighed.start(forest, &wanted[forest.view]);
            readback.masses.push((first, forest.passes().collect()));
        }
    }
    readback.feeds = mem::take(feeds);
    Ok(readback)
}
