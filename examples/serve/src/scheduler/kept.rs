//! Prefixes in files, which outlive the server.

use pikv::prefix::{PrefixIndex, PrefixScope};
use pikv::{Cache, Sequence};
use std::error::Error;
use std::path::{Path, PathBuf};
use std::time::SystemTime;
use std::{fs, io};

/// A folder of saved sequences, one a file.
pub struct Kept {
    folder: PathBuf,
    /// Most bytes of its files.
    most: u64,
}

impl Kept {
    /// Restores the sequences of a folder and publishes them to the index, the newest last. A file that cannot be read, such as one of
    /// another model, is reported and stays.
    ///
    /// # Errors
    /// If the folder cannot be made or read.
    pub fn open(folder: &Path, most: u64, cache: &Cache, index: &PrefixIndex) -> io::Result<Kept> {
        fs::create_dir_all(folder)?;
        let kept = Kept { folder: folder.into(), most };
        for (_, _, path) in kept.files()? {
            if let Err(error) = publish(&path, cache, index) {
                eprintln!("{}: {error}", path.display());
            }
        }
        Ok(kept)
    }

    /// Saves the sequence of `tokens`; the oldest files that do not fit are removed. A kill leaves the file whole, or none.
    ///
    /// # Errors
    /// The errors of [`Sequence::save_file`], and of the folder.
    pub fn save(&self, scope: &[u8], tokens: &[u32], sequence: &Sequence) -> Result<(), Box<dyn Error>> {
        let note = serde_json::to_vec(&(scope, tokens))?;
        let name = blake3::hash(&note).to_hex();
        sequence.save_file(&note, self.folder.join(format!("{name}.pikv-kept")))?;
        let mut sum = 0;
        for (_, bytes, path) in self.files()?.into_iter().rev() {
            sum += bytes;
            if sum > self.most {
                fs::remove_file(path)?;
            }
        }
        Ok(())
    }

    /// Time, bytes and path of each saved sequence, and of what a killed save left, the oldest first. Other files are not touched.
    fn files(&self) -> io::Result<Vec<(SystemTime, u64, PathBuf)>> {
        let mut files = Vec::new();
        for entry in fs::read_dir(&self.folder)? {
            let entry = entry?;
            if entry.file_name().to_string_lossy().contains(".pikv-kept") {
                let meta = entry.metadata()?;
                files.push((meta.modified()?, meta.len(), entry.path()));
            }
        }
        files.sort();
        Ok(files)
    }
}

fn publish(path: &Path, cache: &Cache, index: &PrefixIndex) -> Result<u32, Box<dyn Error>> {
    let mut restored = cache.restore_file(path)?;
    let (scope, tokens): (Vec<u8>, Vec<u32>) = serde_json::from_slice(&restored.note)?;
    Ok(index.publish(&PrefixScope::new(&scope), &tokens, &mut restored.sequence)?)
}
