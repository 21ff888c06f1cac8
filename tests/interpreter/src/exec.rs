//! Runs the kernels of a module, block after block, and the warps of a block between its barriers one after another.

use super::alu::{ALL, Failure, Registers};
use super::memory::{Local, Memory, Who};
use super::parse::{Entry, File, Module, Source};
use super::{Cause, Data, Fault, Inst, LANES, Op, ParseError, R, Shfl, Space};
use std::array::from_fn;
use std::mem::swap;
use std::sync::{Arc, Mutex, PoisonError};

/// A module loaded in a memory.
#[derive(Debug)]
pub struct Program {
    /// Instructions of warps that a launch may execute.
    pub budget: u64,
    /// Instructions of warps executed so far.
    pub executed: u64,
    module: Arc<Module>,
    /// Instructions of each entry that some lane executed.
    hits: Vec<Vec<bool>>,
    /// Addresses of the module's variables.
    globals: Vec<u64>,
}

/// Texts that are kept parsed: more than pikv has modules.
const KEPT: usize = 16;

/// The module of `text`, parsed anew if it is not one of the last few.
fn parsed(text: &str) -> Result<Arc<Module>, ParseError> {
    static PARSED: Mutex<Vec<(String, Arc<Module>)>> = Mutex::new(Vec::new());
    let mut all = PARSED.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((_, module)) = all.iter().find(|(known, _)| known == text) {
        return Ok(module.clone());
    }
    let module = Arc::new(Module::parse(text)?);
    if all.len() == KEPT {
        all.remove(0);
    }
    all.push((text.to_owned(), module.clone()));
    Ok(module)
}

impl Program {
    /// Reads the module and places its variables in `memory`. A text is parsed once a process: tests load the same one for each device.
    pub fn load(text: &str, memory: &mut Memory) -> Result<Program, ParseError> {
        let module = parsed(text)?;
        let globals = module.globals.iter().map(|g| memory.put(&g.bytes)).collect();
        let hits = module.entries.iter().map(|e| vec![false; e.code.len()]).collect();
        Ok(Program { budget: 1 << 32, executed: 0, module, hits, globals })
    }

    /// Frees the module's variables.
    pub fn unload(self, memory: &mut Memory) {
        for address in self.globals {
            memory.free(address).expect("placed when the module was loaded");
        }
    }

    /// Bytes of each parameter of an entry.
    pub fn parameters(&self, entry: &str) -> Option<Vec<usize>> {
        let entry = self.module.entries.iter().find(|e| e.name == entry)?;
        Some(entry.params.iter().map(|p| p.size).collect())
    }

    /// Lines of `entry` whose instruction no launch executed, and the number of lines that could be executed: all except `trap`s, the
    /// `exit`s after them and the branches to them.
    pub fn idle(&self, entry: &str) -> (Vec<u32>, usize) {
        let Some(index) = self.module.entries.iter().position(|e| e.name == entry) else {
            return (Vec::new(), 0);
        };
        let code = &self.module.entries[index].code;
        let sane = |i: &Inst| match i.op {
            Op::Bra(to) => !matches!(code[to as usize].op, Op::Trap),
            Op::Trap => false,
            _ => i.opcode != "exit",
        };
        let able: Vec<_> = code.iter().zip(&self.hits[index]).filter(|(i, _)| sane(i)).collect();
        (able.iter().filter(|(_, hit)| !**hit).map(|(i, _)| i.line).collect(), able.len())
    }

    /// Runs `entry` over `grid` blocks of `block` threads; a parameter's bytes in each of `args`.
    pub fn launch(
        &mut self,
        memory: &mut Memory,
        entry: &str,
        grid: u32,
        block: u32,
        args: &[&[u8]],
    ) -> Result<(), Fault> {
        let refuse = |what: &str| {
            let cause = Cause::Launch(format!("{entry}: {what}"));
            Err(Fault { line: 0, opcode: String::new(), warp: 0, lane: 0, cause })
        };
        let Some(index) = self.module.entries.iter().position(|e| e.name == entry) else {
            return refuse("no such entry");
        };
        let (e, hits) = (&self.module.entries[index], &mut self.hits[index]);
        if args.len() != e.params.len() || args.iter().zip(&e.params).any(|(a, p)| a.len() != p.size) {
            return refuse("not the entry's parameters");
        }
        if block == 0 || !block.is_multiple_of(LANES as u32) {
            return refuse("a block that is not whole warps");
        }
        let mut params = Vec::new();
        for (arg, param) in args.iter().zip(&e.params) {
            params.resize(param.at, 0);
            params.extend_from_slice(arg);
        }
        let launch = memory.next_launch();
        let per_block = block / LANES as u32;
        let who = Who { launch, warp: 0, per_block, epoch: 0, since: 0, lanes: 0 };
        let state = || State { regs: Registers::new(e.registers), local: Local::new(e.local), who, at: None };
        let mut warps: Vec<State> = (0..per_block).map(|_| state()).collect();
        let mut warp = Warp { memory, params: &params, shared: Memory::default(), state: state() };
        let mut left = self.budget;
        for index in 0..grid {
            warp.shared = Memory::shared(e.shared);
            for (state, i) in warps.iter_mut().zip(index * per_block..) {
                state.reset(e, &self.globals, i, grid);
            }
            if let Err((pc, who, (lane, cause))) = warp.run_block(&mut warps, e, hits, &mut left) {
                let Inst { line, opcode, .. } = &e.code[pc as usize];
                self.executed += self.budget - left;
                return Err(Fault { line: *line, opcode: opcode.clone(), warp: who, lane, cause });
            }
        }
        self.executed += self.budget - left;
        Ok(())
    }
}

/// A module, and memory that its kernels run on.
#[derive(Debug)]
pub struct Machine {
    pub memory: Memory,
    pub program: Program,
}

impl Machine {
    /// Reads the module and places its variables in a memory that is else empty.
    pub fn new(text: &str) -> Result<Machine, ParseError> {
        let mut memory = Memory::default();
        let program = Program::load(text, &mut memory)?;
        Ok(Machine { memory, program })
    }

    /// [`Program::launch`]
    pub fn launch(&mut self, entry: &str, grid: u32, block: u32, args: &[&[u8]]) -> Result<(), Fault> {
        self.program.launch(&mut self.memory, entry, grid, block, args)
    }
}

/// Lanes at the same instruction.
#[derive(Clone, Copy, Debug)]
struct Group {
    pc: u32,
    lanes: u32,
    /// Lanes that it waits for at a `.sync` operation.
    waits: u32,
}

/// The successor of an instruction.
enum Next {
    Step,
    /// These lanes jump, the others step.
    Jump(u32, u32),
    Exit(u32),
    /// For these lanes of the mask.
    Wait(u32),
    /// For the other warps of the block.
    Rest,
}

/// Registers, local memory and place of a warp.
struct State {
    regs: Registers,
    local: Local,
    who: Who,
    /// The instruction at which it goes on; none at its end.
    at: Option<u32>,
}

/// A warp that runs.
struct Warp<'a> {
    memory: &'a mut Memory,
    params: &'a [u8],
    /// Shared memory of the warp's block.
    shared: Memory,
    state: State,
}

impl Space {
    /// The space of an address.
    #[inline(always)]
    fn of(address: u64) -> Space {
        match address {
            _ if Local::holds(address) => Space::Local,
            _ if Memory::is_shared(address) => Space::Shared,
            _ => Space::Global,
        }
    }
}

impl State {
    /// The state before the first instruction of warp `index` of the launch.
    fn reset(&mut self, e: &Entry, globals: &[u64], index: u32, grid: u32) {
        self.regs.clear();
        self.local.clear();
        let per_block = self.who.per_block;
        (self.who.warp, self.who.epoch, self.who.since, self.at) = (index, 0, 0, Some(0));
        for &(file, r, source) in &e.sources {
            let value = from_fn(|lane| match source {
                Source::Bits(x) => x,
                Source::Global(g) => globals[g],
                Source::Tid => u64::from(index % per_block * LANES as u32 + lane as u32),
                Source::Ntid => u64::from(per_block) * LANES as u64,
                Source::Ctaid => (index / per_block).into(),
                Source::Nctaid => grid.into(),
                Source::Lane => lane as u64,
            });
            match file {
                File::B64 => self.regs.r64[r as usize] = value,
                _ => self.regs.r32[r as usize] = value.map(|x| x as u32),
            }
        }
    }
}

fn lanes(mut mask: u32) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        let lane = mask.trailing_zeros();
        mask &= mask.wrapping_sub(1);
        (lane < u32::BITS).then_some(lane as usize)
    })
}

impl Warp<'_> {
    /// Runs the warps of a block, each up to its end or the next barrier of the block, until all have ended. A fault has its instruction
    /// and its warp.
    fn run_block(
        &mut self,
        warps: &mut [State],
        e: &Entry,
        hits: &mut [bool],
        left: &mut u64,
    ) -> Result<(), (u32, u32, Failure)> {
        loop {
            for state in warps.iter_mut().filter(|state| state.at.is_some()) {
                swap(&mut self.state, state);
                let done = self.run(e, hits, left);
                self.state.at = done.map_err(|(pc, failure)| (pc, self.state.who.warp, failure))?;
                swap(&mut self.state, state);
            }
            let epoch = 1 + warps.iter().map(|state| state.who.epoch).max().unwrap_or(0);
            let Some(waits) = warps.iter().find(|state| state.at.is_some()) else { return Ok(()) };
            if let Some(ended) = warps.iter().find(|state| state.at.is_none()) {
                let at = waits.at.map_or(0, |next| next - 1);
                return Err((at, waits.who.warp, (0, Cause::Deserted { other: ended.who.warp })));
            }
            for state in warps.iter_mut() {
                (state.who.epoch, state.who.since) = (epoch, epoch);
            }
        }
    }

    /// Runs the warp from where it is; returns where it goes on after a barrier of the block, none at its end.
    fn run(&mut self, e: &Entry, hits: &mut [bool], left: &mut u64) -> Result<Option<u32>, (u32, Failure)> {
        let mut now = Group { pc: self.state.at.unwrap_or(0), lanes: ALL, waits: 0 };
        let mut others: Vec<Group> = Vec::new();
        loop {
            if !others.is_empty() || now.waits != 0 {
                // The lowest instruction first, with all lanes that are at it.
                others.push(now);
                let Some(pc) = others.iter().filter(|g| g.waits == 0).map(|g| g.pc).min() else {
                    let first = others.iter().min_by_key(|g| g.pc).unwrap_or(&now);
                    let missing = first.waits;
                    return Err((first.pc, (first.lanes.trailing_zeros(), Cause::Divergent { missing })));
                };
                now = Group { pc, lanes: 0, waits: 0 };
                others.retain(|g| {
                    now.lanes |= if g.pc == pc { g.lanes } else { 0 };
                    g.pc != pc
                });
            }
            let Some(inst) = e.code.get(now.pc as usize) else {
                return Err((now.pc - 1, (0, Cause::OutOfBounds { address: now.pc.into() })));
            };
            let on = match inst.guard {
                None => now.lanes,
                Some((p, set)) => {
                    now.lanes
                        & if set { self.state.regs.p[p as usize] } else { !self.state.regs.p[p as usize] }
                }
            };
            if *left == 0 {
                return Err((now.pc, (now.lanes.trailing_zeros(), Cause::Budget)));
            }
            *left -= 1;
            hits[now.pc as usize] |= on != 0;
            let next = if on == 0 { Next::Step } else { self.step(&inst.op, on).map_err(|x| (now.pc, x))? };
            match next {
                Next::Step => now.pc += 1,
                Next::Jump(lanes, pc) if lanes == now.lanes => now.pc = pc,
                Next::Jump(lanes, pc) => {
                    others.push(Group { pc, lanes, waits: 0 });
                    now = Group { pc: now.pc + 1, lanes: now.lanes & !lanes, waits: 0 };
                }
                Next::Exit(lanes) => {
                    now = Group { pc: now.pc + 1, lanes: now.lanes & !lanes, waits: 0 };
                    if now.lanes == 0 {
                        match others.pop() {
                            Some(g) => now = g,
                            None => return Ok(None),
                        }
                    }
                }
                Next::Wait(missing) => {
                    now.waits = missing;
                }
                Next::Rest => return Ok(Some(now.pc + 1)),
            }
        }
    }

    /// A load of each lane, or with `store` a store.
    fn access(
        &mut self,
        store: bool,
        space: Space,
        data: &Data,
        at: [u64; LANES],
        on: u32,
    ) -> Result<(), Failure> {
        let (size, count) = (u64::from(data.size), usize::from(data.count));
        let first = on.trailing_zeros() as usize;
        // The same address in all lanes is read once.
        let alike = !store && !Local::holds(at[first]) && lanes(on).all(|i| at[i] == at[first]);
        for lane in lanes(if alike { 1 << first } else { on }) {
            let (fail, address) = (|cause| (lane as u32, cause), at[lane]);
            let place = Space::of(address);
            if space != Space::Generic && space != place {
                return Err(fail(Cause::OutOfBounds { address }));
            }
            if !address.is_multiple_of(size * count as u64) {
                return Err(fail(Cause::Misaligned { address }));
            }
            let who = Who { lanes: if alike { on } else { 1 << lane }, ..self.state.who };
            for (j, &(r, wide)) in data.regs[..count].iter().enumerate() {
                let (address, size) = (address + j as u64 * size, size as usize);
                if store {
                    let x = if wide {
                        self.state.regs.r64[r as usize][lane]
                    } else {
                        self.state.regs.r32[r as usize][lane].into()
                    };
                    match place {
                        Space::Local => self.state.local.store(address, size, x, lane),
                        Space::Shared => self.shared.store(address, size, x, who),
                        _ => self.memory.store(address, size, x, who),
                    }
                    .map_err(fail)?;
                    continue;
                }
                let x = match place {
                    Space::Local => self.state.local.load(address, size, lane),
                    Space::Shared => self.shared.load(address, size, who),
                    _ => self.memory.load(address, size, who),
                };
                self.deliver((r, wide), x.map_err(fail)?, who.lanes);
            }
        }
        Ok(())
    }

    /// Writes a loaded value to a register of these lanes.
    #[inline(always)]
    fn deliver(&mut self, (r, wide): (R, bool), x: u64, to: u32) {
        for lane in lanes(to) {
            match wide {
                true => self.state.regs.r64[r as usize][lane] = x,
                false => self.state.regs.r32[r as usize][lane] = x as u32,
            }
        }
    }

    /// Lanes of the mask at `mask` that are not here.
    fn absent(&self, on: u32, mask: R) -> Result<u32, Failure> {
        let masks = &self.state.regs.r32[mask as usize];
        let first = on.trailing_zeros() as usize;
        for lane in lanes(on) {
            if masks[lane] != masks[first] || masks[lane] >> lane & 1 == 0 {
                return Err((lane as u32, Cause::Divergent { missing: masks[lane] & !on }));
            }
        }
        Ok(masks[first] & !on)
    }

    /// `d` and `ok` of a shuffle in which exactly the lanes of its mask take part.
    fn shfl(
        &mut self,
        kind: Shfl,
        on: u32,
        (d, ok): (R, Option<R>),
        [a, b, c]: [R; 3],
    ) -> Result<(), Failure> {
        let [a, b, c] = [a, b, c].map(|r| self.state.regs.r32[r as usize]);
        let mut inside = 0;
        let mut v = a;
        for lane in lanes(on) {
            let (i, by) = (lane as u32, b[lane] & 31);
            let (clamp, segment) = (c[lane] & 31, c[lane] >> 8 & 31);
            let (low, high) = (i & segment, i & segment | clamp & !segment);
            let (source, within) = match kind {
                Shfl::Bfly => (i ^ by, i ^ by <= high),
                Shfl::Idx => (low | by & !segment, low | by & !segment <= high),
                Shfl::Up => (i.wrapping_sub(by), i as i32 - by as i32 >= high as i32),
                Shfl::Down => (i + by, i + by <= high),
            };
            let source = if within { source } else { i };
            if on >> source & 1 == 0 {
                return Err((i, Cause::AbsentLane { source }));
            }
            v[lane] = a[source as usize];
            inside |= u32::from(within) << lane;
        }
        self.state.regs.put32(on, d, v);
        if let Some(p) = ok {
            self.state.regs.put_p(on, p, inside);
        }
        Ok(())
    }

    fn step(&mut self, op: &Op, on: u32) -> Result<Next, Failure> {
        match *op {
            Op::LdParam(ref data, at) => {
                let size = usize::from(data.size);
                for (bytes, &r) in
                    self.params[at as usize..].chunks_exact(size).zip(&data.regs[..data.count.into()])
                {
                    self.deliver(r, bytes.iter().rev().fold(0, |x, &b| x << 8 | u64::from(b)), on);
                }
            }
            Op::Ld(space, ref data, a, offset) | Op::St(space, ref data, a, offset) => {
                let at = self.state.regs.r64[a as usize].map(|x| x.wrapping_add_signed(offset));
                self.access(matches!(op, Op::St(..)), space, data, at, on)?;
            }
            Op::Atom64(kind, d, a, offset, x) => {
                for lane in lanes(on) {
                    let address = self.state.regs.r64[a as usize][lane].wrapping_add_signed(offset);
                    let value = self.state.regs.r64[x as usize][lane];
                    let before = self.memory.atomic(kind, address, value, self.state.who.launch);
                    self.state.regs.r64[d as usize][lane] = before.map_err(|cause| (lane as u32, cause))?;
                }
            }
            Op::Shfl { kind, d, ok, a, b, c, mask } => match self.absent(on, mask)? {
                0 => self.shfl(kind, on, (d, ok), [a, b, c])?,
                missing => return Ok(Next::Wait(missing)),
            },
            Op::Ballot(d, p, mask) => match self.absent(on, mask)? {
                0 => self.state.regs.put32(on, d, [self.state.regs.p[p as usize] & on; LANES]),
                missing => return Ok(Next::Wait(missing)),
            },
            Op::SyncWarp(mask) => match self.absent(on, mask)? {
                0 => self.state.who.epoch += 1,
                missing => return Ok(Next::Wait(missing)),
            },
            Op::SyncBlock => {
                let missing = !on;
                return Ok(if missing == 0 { Next::Rest } else { Next::Wait(missing) });
            }
            Op::Bra(target) => return Ok(Next::Jump(on, target)),
            Op::Ret => return Ok(Next::Exit(on)),
            Op::Trap => return Err((on.trailing_zeros(), Cause::Trap)),
            _ => self.state.regs.step(op, on)?,
        }
        Ok(Next::Step)
    }
}
