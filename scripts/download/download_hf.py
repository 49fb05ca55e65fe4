"""Download models from Hugging Face into models/, every file verified.

python scripts/download/download_hf.py                                      # Qwen3-0.6B, 1.5 GB
python scripts/download/download_hf.py Qwen/Qwen3-8B                        # 16 GB
python scripts/download/download_hf.py deepseek-ai/DeepSeek-V2-Lite-Chat    # 31 GB
HF_ENDPOINT=https://your-mirror python scripts/download/download_hf.py      # through a mirror

Run it again to resume. A private or gated model needs a token: `hf auth login`, or HF_TOKEN.
"""

from common import main

if __name__ == "__main__":
    main("hf", __doc__)
