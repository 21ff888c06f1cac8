//! The server as a program: `serve --help`.

use pikv::Dtype;
use pikv::codec::Code;
use pikv_serve::load::Load;
use pikv_serve::model::Model;
use pikv_serve::{Options, Server, Store, load};
use std::error::Error;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

const HELP: &str = "serve [OPTION VALUE]..
  --gguf FILE        a Llama; the mixture of experts of this repository without
  --address A        where to listen, 127.0.0.1:8080 by default
  --budget MIB       pages of the first tier, 256
  --parking MIB      host memory for requests that wait, 256; 0 for none
  --prefixes MIB     what the prefix index may hold of the budget, 64; 0 for no index
  --keep FOLDER      where answered requests are saved, to be found after a start
  --store FORM       f32, f16, bf16 (default), int8 or int4
  --requests N       open requests, 256
  --deadline SECONDS the longest time of a request, 60; a day at most
  --load SECONDS     serve nobody, but measure clients that come and hang up
  --clients N        how many of them, 64
  --csv FILE         where their figures are written";

fn main() {
    if let Err(error) = run() {
        eprintln!("{error}");
        std::process::exit(1);
    }
}

fn run() -> Result<(), Box<dyn Error>> {
    let (mut options, mut address, mut gguf) = (Options::default(), "127.0.0.1:8080".to_string(), None);
    let (mut seconds, mut load) = (0, Load::default());
    let mut args = std::env::args().skip(1);
    while let Some(name) = args.next() {
        if name == "--help" {
            println!("{HELP}");
            return Ok(());
        }
        let value = args.next().ok_or_else(|| format!("{name}: a value must follow\n{HELP}"))?;
        let number = || value.parse::<u64>().map_err(|_| format!("{name}: {value:?} is no whole number"));
        let bytes = || number()?.checked_mul(1 << 20).ok_or_else(|| format!("{name}: {value} is too large"));
        match name.as_str() {
            "--gguf" => gguf = Some(PathBuf::from(&value)),
            "--address" => address = value.clone(),
            "--budget" => options.budget = bytes()?,
            "--parking" => options.parking = bytes()?,
            "--prefixes" => options.prefixes = bytes()?,
            "--keep" => options.keep = Some(PathBuf::from(&value)),
            "--store" => options.store = store(&value)?,
            "--requests" => options.requests = number()? as usize,
            "--deadline" => options.deadline = Duration::from_secs(number()?.min(24 * 60 * 60)),
            "--load" => seconds = number()?,
            "--clients" => load.clients = number()? as usize,
            "--csv" => load.csv = Some(PathBuf::from(&value)),
            _ => return Err(format!("{name}: no such option\n{HELP}").into()),
        }
    }
    let model = Arc::new(gguf.as_deref().map_or_else(Model::moe, Model::open)?);
    if seconds > 0 {
        return load::measure(&model, &Load { seconds: Duration::from_secs(seconds), ..load });
    }
    let server = Server::start(model.clone(), options, address.parse()?)?;
    println!("{} at http://{}", model.name, server.address);
    loop {
        std::thread::park();
    }
}

fn store(name: &str) -> Result<Store, String> {
    let plain = [Dtype::F32, Dtype::F16, Dtype::Bf16].into_iter().find(|dtype| dtype.name() == name);
    let packed = [Code::Int8, Code::Int4].into_iter().find(|code| code.name() == name);
    let store = plain.map(Store::Dtype).or(packed.map(Store::Packed));
    store.ok_or_else(|| format!("--store: {name:?}; f32, f16, bf16, int8 and int4 are known"))
}
