"""Download models from ModelScope into models/, every file verified.

python scripts/download/download_modelscope.py                                      # Qwen3-0.6B, 1.5 GB
python scripts/download/download_modelscope.py Qwen/Qwen3-8B                        # 16 GB
python scripts/download/download_modelscope.py deepseek-ai/DeepSeek-V2-Lite-Chat    # 31 GB
MODELSCOPE_ENDPOINT=https://www.modelscope.ai python scripts/download/download_modelscope.py

Run it again to resume. A private model needs a token: MODELSCOPE_API_TOKEN.
"""

from common import main

if __name__ == "__main__":
    main("ms", __doc__)
